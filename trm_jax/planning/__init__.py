"""What a step costs on chips, from shapes alone: nothing is allocated and nothing runs.

`abstract_step` is the train and decode step as programs of shapes, `compiled` reads what the
compiler made of them, `products` counts by hand, `chips` holds published peaks.
"""
