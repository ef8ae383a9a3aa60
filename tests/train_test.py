"""The program and the loop: what is refused, resume bit for bit, failures that lose nothing."""

import dataclasses
import functools
import json
import math
import os
import signal

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from trm_jax import policy, tasks, training
from trm_jax.mismatch import decoding, fleet, reporting, routing, staleness
from trm_jax.runs import recording
from trm_jax.training import loop, update
from trm_jax.training.words import MethodWords
from trm_jax.types import InputError, NonFiniteError

TINY = policy.PolicyConfig(
  width=16, layers=1, heads=2, kv_heads=2, head_width=8, mlp_width=16, experts=2
)
DENSE = dataclasses.replace(TINY, experts=0, experts_per_token=0)
JITTER = fleet.Engine(routing=routing.Routing(jitter=1.0))
# Everything that has a state of its own: history, followed limit, minibatches, epochs.
CONFIG = training.Config(
  task='toy_task',
  steps=7,
  prompts=4,
  samples=4,
  eval_prompts=8,
  eval_every=3,
  save_every=2,
  epochs=2,
  minibatches=2,
  retrospective=True,
  policy=TINY,
  warm_start=training.WarmStart(steps=3, batch=8),
  fleet=fleet.Fleet(
    broken=fleet.Engine(staleness=staleness.Staleness(steps=2, switch=6)), broken_samples=2
  ),
  method=MethodWords(max_kl=0.01, accept=0.7, surrogate='clip', anchor='version'),
  optimizer=training.Optimizer(warmup=1, learning_rate=3e-2),
  data_dir=os.path.join(os.environ['TFDS_DATA_DIR'], 'train_test'),
)


@functools.cache
def program():
  built = training.build(CONFIG)
  tasks.prepare(built.task, CONFIG.data_dir)
  return built


class Watch:
  """Stands for the progress display; may raise a signal at a step."""

  def __init__(self, stop_at=None, number=signal.SIGTERM):
    self.stop_at, self.number, self.seen = stop_at, number, []

  def update(self, step, **_):
    self.seen.append(step)
    if step == self.stop_at:
      os.kill(os.getpid(), self.number)

  def close(self):
    pass


@pytest.fixture(scope='module')
def start(tmp_path_factory):
  return loop.warm_start(program(), tmp_path_factory.mktemp('w') / 'warm', progress=Watch())


@pytest.fixture(scope='module')
def whole(tmp_path_factory, start):
  """The uninterrupted run: (metrics, final state)."""
  path = tmp_path_factory.mktemp('r') / 'whole'
  metrics = loop.run(program(), path, start, progress=Watch())
  return metrics, final_state(path, start)


def final_state(path, start):
  with jax.set_mesh(program().mesh), recording.open_run(path, about(), resume=True) as record:
    state = program().start(start, jax.random.key(0))
    step, state, meta = record.restore(loop.abstract(state))
  return step, [np.asarray(x).tobytes() for x in jax.tree.leaves(plain(state))], meta


def plain(state):
  return dataclasses.replace(state, key=jax.random.key_data(state.key))


def about():
  method_ = dataclasses.asdict(CONFIG.method)
  return loop.settings(program(), label='rl', strength=1.0, method=method_)


def timeless(metrics):
  clocked = ('seconds', 'tokens_per_second')
  return [{k: v for k, v in row.items() if k not in clocked} for row in metrics]


def same(a, b):
  """Equal metrics, NaN equal to NaN, to the last bit."""
  assert [sorted(r) for r in a] == [sorted(r) for r in b]
  for left, right in zip(a, b, strict=True):
    for name in left:
      x, y = left[name], right[name]
      assert x == y or (x != x and y != y), (left['step'], name, x, y)


def test_rows_of_a_run(whole):
  metrics, (step, _, _) = whole
  assert [row['step'] for row in metrics] == list(range(8)) and step == 7
  assert [r['step'] for r in metrics if 'accuracy/greedy' in r] == [0, 3, 6, 7]
  assert {
    'reward',
    'acceptance',
    'kl/mean',
    'kl/median',
    'kl/p90',
    'kl/max',
    'tv/max',
    'ratio/max',
    'ess',
    'entropy',
    'grad_norm',
    'reward/kept',
    'reward/rejected',
    'limit',
    'acceptance/length_q4',
  } <= set(metrics[3])
  assert len({row['limit'] for row in metrics[1:]}) > 3  # the limit follows
  assert metrics[5]['kl/engine1'] > metrics[5]['kl/engine0'] > 0
  # Of each prompt's samples two are fresh, and two age by 2, 1 and 0 steps as they grow.
  assert [row['age/max'] for row in metrics[1:]] == [0, 1, 2, 2, 2, 2, 2]
  assert 0 < metrics[2]['age/mean'] < 0.5 and 0 < metrics[5]['age/mean'] < 1
  assert all(row['nonfinite_rows'] == 0 for row in metrics[1:])
  # Before the first step there is nothing to look back at: the weights are the same.
  back = [row['retrospective/estimate'] for row in metrics[1:]]
  assert abs(back[0]) < 1e-4 < min(map(abs, back[1:])) and max(map(abs, back)) < 10
  assert all(row['certificate/lower'] <= row['certificate/estimate'] for row in metrics[1:])


@pytest.mark.parametrize(
  'step, number',
  [
    pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
    (4, signal.SIGINT),
    pytest.param(5, 15, marks=pytest.mark.slow),
  ],
)
def test_interrupted_run_continues_bit_for_bit(tmp_path, start, whole, step, number):
  path = tmp_path / 'run'
  with pytest.raises(loop.Interrupted, match='--resume'):
    loop.run(program(), path, start, progress=Watch(step, number))
  half = recording.read_metrics(path / 'metrics.jsonl')
  assert step <= half[-1]['step'] < 7
  metrics = loop.run(program(), path, start, resume=True, progress=Watch())
  same(timeless(metrics), timeless(whole[0]))
  assert final_state(path, start) == whole[1]


@pytest.mark.slow
def test_killed_run_falls_back_to_its_last_checkpoint(tmp_path, start, whole):
  """Dies (here: an exception out of nowhere) between checkpoints 4 and 6, having logged step 5."""

  class Dies(Watch):
    def update(self, step, **_):
      if step == 5:
        raise RuntimeError('power cut')

  path = tmp_path / 'run'
  with pytest.raises(RuntimeError, match='power cut'):
    loop.run(program(), path, start, progress=Dies())
  assert recording.read_metrics(path / 'metrics.jsonl')[-1]['step'] == 5
  seen = Watch()
  metrics = loop.run(program(), path, start, resume=True, progress=seen)
  assert seen.seen[0] == 5  # step 4 was the checkpoint
  same(timeless(metrics), timeless(whole[0]))
  assert final_state(path, start) == whole[1]


@pytest.mark.slow
def test_traced_steps_memory_and_speed_are_recorded(tmp_path, start):
  short = dataclasses.replace(program(), config=dataclasses.replace(CONFIG, steps=3))
  compiles = []
  listen = lambda name, seconds, **_: compiles.append(name) if 'backend_compile' in name else None
  jax.monitoring.register_event_duration_secs_listener(listen)
  loop.run(short, tmp_path / 'warm', start, progress=Watch())  # whatever is compiled on the way
  compiles.clear()
  metrics = loop.run(short, tmp_path / 'run', start, progress=Watch(), profile=(2, 3))
  assert not compiles  # the program that was asked for its memory is the one that ran
  traces = list((tmp_path / 'run' / 'profile').rglob('*.xplane.pb'))
  assert len(traces) == 1
  assert not (tmp_path / 'warm' / 'profile').exists()
  memory = json.loads((tmp_path / 'run' / 'memory.json').read_text())
  assert memory['aliased'] > 1000 and memory['arguments'] > memory['aliased']
  for row in metrics[1:]:
    tokens = row['length'] * CONFIG.prompts * CONFIG.samples
    assert row['tokens_per_second'] == pytest.approx(tokens / row['seconds'])
  assert 'tokens_per_second' not in metrics[0]
  assert not any(name.startswith('time/') for row in metrics for name in row)


@pytest.mark.slow
def test_a_trace_can_tell_the_parts_of_a_step(start):
  with jax.set_mesh(program().mesh):
    state = program().start(start, jax.random.key(0))
    batch = loop.rows(next(loop.prompts(program(), 'train', CONFIG.prompts, seed=1)))
    arm = update.Arm(jnp.int32(0), jnp.float32(1))
    text = program().step.lower(state, arm, *batch).as_text(debug_info=True)
  for scope in ('rollout', 'update', 'statistics'):
    assert f'{scope}/' in text or f'({scope})' in text, scope


def test_steps_that_are_not_run_cannot_be_traced(tmp_path, start):
  with pytest.raises(InputError, match='profile=7:8 lies beyond the last step, 7'):
    loop.run(program(), tmp_path / 'run', start, progress=Watch(), profile=(7, 8))


@pytest.mark.slow
def test_parts_of_a_step_are_timed_once(tmp_path, start):
  short = dataclasses.replace(program(), config=dataclasses.replace(CONFIG, steps=2))
  metrics = loop.run(short, tmp_path / 'run', start, progress=Watch(), time_parts=True)
  names = {'time/rollout', 'time/statistics', 'time/update'}
  assert names <= set(metrics[1]) and not names & set(metrics[2])
  assert all(metrics[1][name] > 0 for name in names)


@pytest.mark.slow
def test_finished_run_is_only_read(tmp_path, start):
  path = tmp_path / 'run'
  first = loop.run(program(), path, start, progress=Watch())
  seen = Watch()
  again = loop.run(program(), path, start, resume=True, progress=seen)
  same(first, again)
  assert seen.seen == []


def test_warm_start_is_reused_and_continues(tmp_path, start):
  path = tmp_path / 'warm'
  before = [np.asarray(x) for x in jax.tree.leaves(start)]
  for _ in range(2):
    params = loop.warm_start(program(), path, progress=Watch())
    for a, b in zip(before, jax.tree.leaves(params), strict=True):
      np.testing.assert_array_equal(a, b)
  other = dataclasses.replace(program(), config=dataclasses.replace(CONFIG, seed=1))
  with pytest.raises(InputError, match='seed'):
    loop.warm_start(other, path, progress=Watch())


@pytest.mark.slow
def test_run_does_not_consume_the_callers_parameters(tmp_path, start):
  loop.run(program(), tmp_path / 'run', start, progress=Watch())
  assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(start))


@pytest.mark.slow
def test_non_finite_loss_stops_names_step_and_rows_and_keeps_the_checkpoint(tmp_path, start):
  path, good = tmp_path / 'run', program()
  calls = []

  def poisoned(state, arm, prompts, starts):
    calls.append(1)
    if len(calls) == 4:  # a broken device: NaN weights from here on
      bad = jax.tree.map(lambda x: x * jnp.nan, state.params)
      state = dataclasses.replace(state, params=bad)
    return good.step(state, arm, prompts, starts)

  poisoned.lower = good.step.lower
  with pytest.raises(NonFiniteError, match=r'step 4: .*rows \[0, 1'):
    loop.run(dataclasses.replace(good, step=poisoned), path, start, progress=Watch())
  assert recording.read_metrics(path / 'metrics.jsonl')[-1]['step'] == 3
  with jax.set_mesh(good.mesh), recording.open_run(path, about(), resume=True) as record:
    step, state, _ = record.restore(loop.abstract(good.start(start, jax.random.key(0))))
  assert step == 2
  assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state.params))


@pytest.mark.slow
def test_another_config_in_the_directory_is_refused(tmp_path, start):
  path = tmp_path / 'run'
  loop.run(program(), path, start, progress=Watch())
  with pytest.raises(InputError, match='--resume'):
    loop.run(program(), path, start, progress=Watch())
  other = dataclasses.replace(program(), config=dataclasses.replace(CONFIG, temperature=0.5))
  with pytest.raises(InputError, match='temperature'):
    loop.run(other, path, start, resume=True, progress=Watch())


@pytest.mark.slow
def test_more_steps_extend_a_finished_run(tmp_path, start, whole):
  short = dataclasses.replace(program(), config=dataclasses.replace(CONFIG, steps=4))
  loop.run(short, tmp_path / 'run', start, progress=Watch())
  metrics = loop.run(program(), tmp_path / 'run', start, resume=True, progress=Watch())
  # The last step of the short run was evaluated out of turn; all else is the same run.
  drop = lambda rows: [
    {k: v for k, v in r.items() if not k.startswith('accuracy')} for r in timeless(rows)
  ]
  same(drop(metrics), drop(whole[0]))


@pytest.mark.slow
def test_a_run_goes_on_only_with_what_it_was_made_with(tmp_path, start):
  path, config = tmp_path / 'run', dataclasses.replace(CONFIG, steps=2, save_every=1)
  loop.run(training.build(config), path, start, progress=Watch())
  longer = training.build(dataclasses.replace(config, steps=3))
  other = jax.tree.map(lambda x: x + 1, start)
  with pytest.raises(InputError, match='other content .digest of weights was .*put that back'):
    loop.run(longer, path, other, resume=True, progress=Watch())
  edited = dataclasses.replace(
    longer, task=dataclasses.replace(longer.task, reward=lambda *rows: rows[1] * 0.0)
  )
  with pytest.raises(InputError, match='other content .digest of reward was '):
    loop.run(edited, path, start, resume=True, progress=Watch())
  lines = (path / 'metrics.jsonl').read_text().splitlines(keepends=True)
  (path / 'metrics.jsonl').write_text(lines[0] + lines[2])
  with pytest.raises(InputError, match='has no row of step 1: put back'):
    loop.run(longer, path, start, resume=True, progress=Watch())
  (path / 'metrics.jsonl').write_text(''.join(lines))
  rows = loop.run(longer, path, start, resume=True, progress=Watch())
  assert [row['step'] for row in rows] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_stuck_engine_keeps_the_weights_of_step_0():
  config = dataclasses.replace(
    CONFIG,
    fleet=fleet.Fleet(
      broken=fleet.Engine(staleness=staleness.Staleness(stuck=True)), broken_samples=2
    ),
    method=MethodWords(),
    epochs=1,
    minibatches=1,
  )
  built = training.build(config)
  with jax.set_mesh(built.mesh):
    params = built.init(jax.random.key(0))
    state = built.start(params, jax.random.key(1))
    data = loop.prompts(built, 'train', config.prompts, seed=0)
    kl = []
    for _ in range(4):
      state, scalars, _ = built.step(
        state, update.Arm(jnp.int32(0), jnp.float32(1)), *loop.rows(next(data))
      )
      kl.append((float(scalars['kl/engine0']), float(scalars['kl/engine1'])))
    for a, b in zip(jax.tree.leaves(state.first), jax.tree.leaves(params), strict=True):
      np.testing.assert_array_equal(a, b)
    state, scalars, _ = built.step(
      state, update.Arm(jnp.int32(0), jnp.float32(0)), *loop.rows(next(data))
    )
  assert max(healthy for healthy, _ in kl) < 1e-9
  assert kl[0][1] < 1e-9 < 1e-6 < kl[3][1]  # the first rollout is not stale yet
  assert float(scalars['kl/engine1']) < 1e-9  # strength 0 mends it without recompiling


@pytest.mark.parametrize(
  'setting, word',
  [
    (dict(samples=1), 'samples'),
    (dict(prompts=0), 'prompts'),
    (dict(steps=-1), 'steps'),
    (dict(seed=-1), 'seed'),
    (dict(temperature=0.0), 'temperature'),
    (dict(mesh='8'), 'mesh'),
    (dict(mesh='3,1'), 'prompts=4'),
    (dict(minibatches=3), 'minibatches'),
    (dict(microbatches=8), 'microbatches'),
    (dict(mesh='1,3'), 'kv_heads'),
    (dict(policy=dataclasses.replace(TINY, kv_heads=1)), 'policy.kv_heads=1'),
    (dict(prompts=1, minibatches=1), 'prompts=1 cannot be laid out'),
    (dict(eval_prompts=1), 'eval_prompts=1 cannot be laid out'),
    (dict(warm_start=training.WarmStart(batch=1)), 'warm_start.batch=1 cannot be laid out'),
    (dict(fleet=fleet.Fleet(broken_samples=9)), 'broken_samples=9'),
    (dict(replay_routes='experts', policy=DENSE), "replay_routes='experts' needs experts"),
    (dict(replay_support=True, store='topk'), "replay_support=True .*store='topk' holds none"),
    (dict(fleet=fleet.Fleet(engine=JITTER), policy=DENSE), 'routing'),
    (dict(eval_prompts=7, mesh='2,1'), 'eval_prompts'),
    (dict(store='topk', top=0), 'top=0'),
    (dict(seed=2**32 - 1), 'seed=4294967295 must lie in'),
    (dict(temperature=math.inf), 'temperature=inf must be at least 0.001 and finite'),
    (dict(response_length=0), 'response_length=0 must be at least 1'),
    (dict(fleet=fleet.Fleet(engine=JITTER), policy=DENSE), 'fleet.engine.routing.jitter'),
  ],
)
def test_bad_settings_are_named(setting, word):
  with pytest.raises(InputError, match=word):
    dataclasses.replace(CONFIG, **setting)


def test_misspelt_words_are_named(monkeypatch):
  monkeypatch.setattr(jaxtyping.config, 'jaxtyping_disable', True)  # as users have it
  with pytest.raises(InputError, match="^score='Replay' is not one of decode, replay"):
    dataclasses.replace(CONFIG, score='Replay')
  with pytest.raises(InputError, match="^method.scope='Prefix' is not one of sequence, prefix"):
    MethodWords(scope='Prefix')


def test_a_mesh_need_not_divide_the_vocabulary_over_data():
  wide = dataclasses.replace(TINY, width=24, heads=3, kv_heads=3, mlp_width=24, experts=3)
  sizes = dict(prompts=6, eval_prompts=6, warm_start=training.WarmStart(batch=6), policy=wide)
  program = training.build(dataclasses.replace(CONFIG, **sizes, mesh='3,1'))
  assert program.task.vocab_size % 3
  with pytest.raises(InputError, match=f'cannot split the {program.task.vocab_size} tokens'):
    training.build(dataclasses.replace(CONFIG, **sizes, mesh='1,3'))


@pytest.mark.slow
@pytest.mark.parametrize('warmup, moved', [(0, True), (1, False)])
def test_without_a_warm_up_the_first_update_counts(warmup, moved):
  optimizer = training.Optimizer(warmup=warmup).make()
  step, _ = optimizer.update(jnp.ones(3), optimizer.init(jnp.ones(3)), jnp.ones(3))
  assert bool(step.any()) is moved


@pytest.mark.parametrize(
  'part, setting, word',
  [
    (training.Optimizer, dict(learning_rate=0.0), 'learning_rate'),
    (training.Optimizer, dict(b2=1.0), 'b2'),
    (training.Optimizer, dict(warmup=-1), 'warmup'),
    (training.WarmStart, dict(steps=-1), 'steps'),
    (training.WarmStart, dict(learning_rate=-1.0), 'learning_rate'),
  ],
)
def test_bad_parts_are_named(part, setting, word):
  with pytest.raises(InputError, match=word):
    part(**setting)


@pytest.mark.slow
def test_fewer_steps_than_done_and_arms_without_what_they_need_are_refused(tmp_path, start):
  loop.run(program(), tmp_path / 'run', start, progress=Watch())
  short = dataclasses.replace(program(), config=dataclasses.replace(CONFIG, steps=4))
  with pytest.raises(InputError, match='steps=4'):
    loop.run(short, tmp_path / 'run', start, resume=True, progress=Watch())
  random = MethodWords(max_kl=0.1, random_mask=True)
  with pytest.raises(InputError, match='random_mask'):
    training.build(dataclasses.replace(CONFIG, method=random, minibatches=1, microbatches=2))


def test_task_longer_than_the_horizon_and_too_small_a_machine_are_refused():
  with pytest.raises(InputError, match='response_length=8'):
    training.build(dataclasses.replace(CONFIG, response_length=8))
  late = fleet.Engine(reporting=reporting.Reporting(shift=99))
  with pytest.raises(InputError, match='fleet.broken.reporting.shift=99 .* slots'):
    training.build(dataclasses.replace(CONFIG, fleet=fleet.Fleet(broken=late, broken_samples=1)))
  with pytest.raises(InputError, match='16 devices'):
    training.build(
      dataclasses.replace(
        CONFIG,
        mesh='16,1',
        prompts=64,
        minibatches=1,
        eval_prompts=16,
        warm_start=training.WarmStart(batch=16),
      )
    )
  with pytest.raises(InputError, match='no.such.module'):
    training.build(dataclasses.replace(CONFIG, task='no.such.module'))


@pytest.mark.slow
@pytest.mark.parametrize('mesh', ['8,1', '4,2'])
def test_mesh_flag_changes_nothing_but_rounding(mesh):
  """`--mesh` against '1,1' through the whole step: rollout, reward, update."""
  found = []
  for layout in ('1,1', mesh):
    config = dataclasses.replace(
      CONFIG,
      mesh=layout,
      prompts=8,
      minibatches=1,
      epochs=1,
      fleet=fleet.Fleet(),
      method=MethodWords(max_kl=0.1),
    )
    built = training.build(config)
    with jax.set_mesh(built.mesh):
      state = built.start(built.init(jax.random.key(0)), jax.random.key(1))
      batch = loop.rows(next(loop.prompts(built, 'train', 8, seed=0)))
      state, scalars, flags = built.step(state, update.Arm(jnp.int32(0), jnp.float32(1)), *batch)
    assert flags['finite'] and scalars['grad_norm'] > 0.01
    found.append(([np.asarray(x) for x in jax.tree.leaves(state.params)], scalars))
  (params, scalars), (meshed, meshed_scalars) = found
  for name in ('length', 'acceptance', 'entropy', 'reward', 'grad_norm'):
    np.testing.assert_allclose(meshed_scalars[name], scalars[name], rtol=1e-4)
  for a, b in zip(meshed, params, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.slow
def test_replayed_experts_weights_and_support_leave_no_mismatch():
  """Of an engine with router noise and a filter."""
  engine = dataclasses.replace(JITTER, decoding=decoding.Decoding(top_k=5))
  config = dataclasses.replace(
    CONFIG, fleet=fleet.Fleet(engine=engine), epochs=1, minibatches=1, retrospective=False,
    method=MethodWords(anchor='recomputed'), replay_routes='weights', replay_support=True,
  )  # fmt: skip
  built = training.build(config)
  tasks.prepare(built.task, CONFIG.data_dir)
  with jax.set_mesh(built.mesh):
    state = built.start(built.init(jax.random.key(0)), jax.random.key(1))
    batch = loop.rows(next(loop.prompts(built, 'train', 4, seed=0)))
    _, scalars, _ = built.step(state, update.Arm(jnp.int32(0), jnp.float32(1)), *batch)
  assert scalars['route_flips'] == 0 and scalars['kl/max'] < 1e-9 and scalars['grad_norm'] > 1e-3
  assert abs(scalars['ratio/max'] - 1) < 1e-4
