"""What a task is, by content: digests of its source and of its rows, whatever anything is called.

The digest of a function or class covers its definition, what that uses of the same module and, as
a whole, each module of the same package or folder that it names. Comments, docstrings and layout
leave it as it is. What a task uses from other packages does not count.
"""

import ast
import functools
import hashlib
import inspect
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

_PLAIN = (bool, int, float, str, bytes, tuple, list, dict, type(None))


def source(part: Any) -> str:
  """16 hexadecimal digits of a function's or class's source and of the values it was made with."""
  return hashlib.sha256(_content(part, ()).encode()).hexdigest()[:16]


def parts(task) -> dict[str, str]:
  """{'builder', 'encode', 'reward'}: a digest of the source of each."""
  return {name: source(getattr(task, name)) for name in ('builder', 'encode', 'reward')}


def _content(part: Any, seen: tuple) -> str:
  if id(part) in seen:
    return ''
  seen = (*seen, id(part))
  if isinstance(part, functools.partial):
    values = (part.func, *part.args, *(x for pair in sorted(part.keywords.items()) for x in pair))
    return ' '.join(_content(value, seen) for value in values)
  if isinstance(part, type):
    return ' '.join(_class(kind) for kind in part.__mro__)
  if inspect.ismethod(part):
    return f'{_content(part.__func__, seen)} {_content(part.__self__, seen)}'
  if isinstance(part, Callable):
    function = inspect.unwrap(part)
    if not inspect.isfunction(function):  # an object that is called
      kept = sorted(getattr(function, '__dict__', {}).items())
      return ' '.join([_class(type(function)), *(f'{k} {_content(v, seen)}' for k, v in kept)])
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    values = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return ' '.join([_definition(function), *(_content(value, seen) for value in values)])
  if hasattr(part, 'dtype'):
    array = np.asarray(part)
    return f'{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}'
  if isinstance(part, (set, frozenset)):
    part = sorted(map(repr, part))
  return re.sub(r' at 0x[0-9a-f]+', '', repr(part))


def _class(kind: type) -> str:
  if kind.__module__.partition('.')[0] in {'builtins', 'abc', 'typing', 'tensorflow_datasets'}:
    return ''
  values = {
    name: value
    for name, value in vars(kind).items()
    if type(value) in _PLAIN and not name.startswith('__') and name not in ('pkg_dir_path', 'name')
  }
  return f'{_definition(kind)} {sorted(values.items())!r}'


def _definition(part: Any) -> str:
  """Source of a definition and of all it uses of its module; '' where `type(...)` made it."""
  module = sys.modules.get(part.__module__)
  top = part.__qualname__.partition('.')[0]
  path = getattr(module, '__file__', None)
  if path is None or not pathlib.Path(path).is_file():
    inside = vars(part).values() if isinstance(part, type) else [part]
    codes = [f.__code__ for f in inside if hasattr(f, '__code__')]  # typed in, not in a file
    return ' '.join(f'{code.co_code.hex()} {code.co_names}' for code in codes)
  text = pathlib.Path(path).read_text()
  names, imported = _names(text, module.__package__ or '')
  wanted, texts = [top], {}
  if top == '<lambda>':
    line = part.__code__.co_firstlineno
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Lambda) and n.lineno == line]
    texts[top] = ' '.join(ast.unparse(node) for node in nodes)
    wanted = [n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)]
  while wanted:
    name = wanted.pop()
    if name in names and name not in texts:
      text, used = names[name]
      texts[name] = text
      wanted += used
    elif name in imported and name not in texts:
      texts[name] = _module(imported[name], part.__module__)
  return ' '.join(texts[name] for name in sorted(texts))


@functools.lru_cache(maxsize=64)
def _names(text: str, package: str) -> tuple[dict, dict]:
  """{name: (source, names in it)} and {name: modules it may come from} of a module."""
  names, imported = {}, {}
  for node in ast.parse(text).body:
    if isinstance(node, ast.Import):
      imported |= {(a.asname or a.name).partition('.')[0]: (a.name,) for a in node.names}
    elif isinstance(node, ast.ImportFrom):
      above = package.rsplit('.', node.level - 1)[0] if node.level else ''
      base = '.'.join(filter(None, (above, node.module)))
      imported |= {a.asname or a.name: (f'{base}.{a.name}', base) for a in node.names}
    else:
      used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
      # Of an assignment its targets alone: a comprehension's variable is no name of the module.
      targets = node.targets if isinstance(node, ast.Assign) else [node]
      defined = {
        n.id
        for target in targets
        for n in ast.walk(target)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
      }
      if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        defined = {node.name}
      for name in defined:
        before, more = names.get(name, ('', ()))
        names[name] = (before + _bare(node), (*more, *sorted(used)))
  return names, imported


def _module(candidates: tuple[str, ...], user: str) -> str:
  """Source of the first of the modules that is one, if it lies beside the user's."""
  for name in candidates:
    module = sys.modules.get(name)
    path = getattr(module, '__file__', None)
    mine = getattr(sys.modules[user], '__file__', '')
    same = name.partition('.')[0] == user.partition('.')[0]
    beside = path and pathlib.Path(path).parent == pathlib.Path(mine).parent
    if path and path.endswith('.py') and (same or beside):
      return _bare(ast.parse(pathlib.Path(path).read_text()))
  return ''


def _bare(tree: ast.AST) -> str:
  """Source without docstrings and comments."""
  for node in ast.walk(tree):
    body = getattr(node, 'body', None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
      if isinstance(getattr(body[0], 'value', None), ast.Constant):
        node.body = body[1:] or [ast.Pass()]
  return ast.unparse(tree)
