"""Tables, verdicts and figures, made from committed summaries without any training."""
