"""A plan in words and as a table, from its figures alone."""

from typing import Any

from trm_jax.planning.chips import GIB


def lines(found: dict[str, Any]) -> list[str]:
  """The plan in words, one figure a line with its source."""
  gib = lambda x: f'{x / GIB:.3f} GiB'
  out = [
    f'{found["model"]} ({found["layers"]} layers) on {found["topology"]} as {found["mesh"]}:'
    f' {found["rows"]} rows of {found["seq"]} a device of DATA, {found["microbatches"]}'
    f' micro-batches, store {found["store"]}; figures are those of one device',
    f'  parameters   {gib(found["parameter_bytes"])}  float32, shapes and layouts',
    f'  optimizer    {gib(found["optimizer_bytes"])}  float32, shapes and layouts',
  ]
  if 'promised_rows' in found:
    rows = found['promised_rows']
    out.append(
      f'  rows         {rows} should fit: the line through two programs, not compiled; --rows'
      f' {rows} or --verify compiles it'
    )
  if 'refused' in found:
    refused = found['refused']
    out += [
      f'  train        DOES NOT FIT: needs {gib(refused["needed"])} of {gib(refused["available"])}'
      f'  compiler: {refused["why"]}',
      f'               {found["remedy"]}',
    ]
  if 'decode_refused' in found:
    refused = found['decode_refused']
    out.append(f'  decode       DOES NOT FIT: {refused["why"]}')
  for name in ('train', 'decode'):
    if name not in found:
      continue
    step = found[name]
    room = f' of {gib(step["available"])}' if 'available' in step else ''
    out += [
      f'{name} step, compiled for {step["compiled_for"]}',
      f'  memory       {gib(step["used"])} at the peak{room}  compiler',
      f'               arguments {gib(step["arguments"])}, temporaries {gib(step["temporaries"])}:'
      ' not all at one time  compiler',
      f'  products     {step["flops"] / 1e12:.3f} TFLOP, {step["flops_by_passes"] / 1e12:.3f} in'
      ' bfloat16 passes  jaxpr',
      f'  traffic      {gib(step["traffic"])}  text, estimate',
    ]
    for kind, entry in step['collectives'].items():
      out.append(f'  {kind}: {entry["count"]} times, {gib(entry["bytes"])} sent  text')
    once = ', '.join(f'{k} {v:.4g}' for k, v in step['once'].items() if v is not None)
    out.append(f'  {once}  once')
    if 'estimate' in step:
      out.append(f'  estimate     {step["estimate"]:.4g} s  cycles')
    if 'bound' in step:
      parts = ', '.join(f'{k} {v:.4g} s' for k, v in step['bound'].items())
      out.append(
        f'  bound        {step["seconds"]:.4g} s ({parts}), {step["tokens_a_second"]:,.0f} tokens/s'
        ' of all devices  published peaks'
      )
  return out


def markdown(plans: list[dict[str, Any]]) -> str:
  """The README's table."""
  head = (
    '| model | chips | mesh | rows a device | HBM GiB | wire bytes a token | bound of a step s |'
    ' estimate s | tokens/s at the bound |\n| --- | --- | --- | --: | --: | --: | --: | --: | --: |'
  )
  rows = [head]
  for found in plans:
    about = f'| {found["model"]} | {found["topology"]} | {found["mesh"]} | {found["rows"]} |'
    if 'refused' in found:
      refused = found['refused']
      needed, room = refused['needed'] / GIB, refused['available'] / GIB
      rows.append(f'{about} does not fit: {needed:.1f} of {room:.1f} | | | | |')
      continue
    step = found['train']
    estimate = f'{step["estimate"]:.2f}' if 'estimate' in step else '-'
    rows.append(
      f'{about} {step["used"] / GIB:.1f} | {step["wire_bytes_a_token"]:,.0f} |'
      f' {step["seconds"]:.2f} | {estimate} | {step["tokens_a_second"]:,.0f} |'
    )
  return '\n'.join(rows)
