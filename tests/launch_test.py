"""Launching: what the local launcher does with its processes, and what the scripts would run."""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest
import tyro
import yaml

from experiments import train_policy
from experiments.launch import local

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / 'experiments' / 'launch'


def run(*command, **environment):
  """(exit code, stdout, stderr); a dry run unless told otherwise."""
  done = subprocess.run(
    command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=60
  )
  return done.returncode, done.stdout, done.stderr


def launch(count, code):
  return run(
    *(sys.executable, '-m', 'experiments.launch.local', '-n', str(count), '--'),
    *(
      sys.executable,
      '-c',
      'import os, sys, time; me = int(os.environ["JAX_PROCESS_ID"])\n' + code,
    ),
  )


def test_each_process_is_told_who_it_is_and_the_first_one_is_heard(tmp_path):
  code = f'open(f"{tmp_path}/{{me}}", "w").write(os.environ["JAX_NUM_PROCESSES"] + " "'
  code += ' + os.environ["JAX_COORDINATOR_ADDRESS"]); print("I am", me)'
  assert launch(3, code) == (0, 'I am 0\n', '')
  told = [(tmp_path / str(index)).read_text() for index in range(3)]
  count, _, address = told[0].partition(' ')
  assert count == '3' and address.startswith('127.0.0.1:') and set(told) == {told[0]}


@pytest.mark.parametrize('failing', [0, 1])
def test_a_process_that_fails_takes_the_others_along(monkeypatch, capfd, failing):
  code = 'import os, sys, time; me = int(os.environ["JAX_PROCESS_ID"])\n'
  code += f'if me == {failing}: sys.exit("error: full")\ntime.sleep(100)'
  assert local.launch([sys.executable, '-c', code], 2, grace=0.3) == 1
  said = capfd.readouterr().err
  assert 'error: full' in said and said.startswith('--- process 1' if failing else 'error: full')
  assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_exit_codes():
  assert launch(2, 'sys.exit(2 if me else 0)')[0] == 2
  assert launch(2, 'os.kill(os.getpid(), 9) if me else None')[0] == 137
  code, _, said = run(sys.executable, '-m', 'experiments.launch.local', '-n', '1', 'no-such-thing')
  assert (
    code == 2 and said == 'error: no-such-thing cannot be started (No such file or directory)\n'
  )
  code, _, said = run(sys.executable, '-m', 'experiments.launch.local', '-n', '0', 'true')
  assert code == 2 and '-n 0 must be at least 1' in said


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process(tmp_path, number):
  code = f"""
import os, signal, sys, time
def stop(number, _):
  open(f'{tmp_path}/' + os.environ['JAX_PROCESS_ID'], 'w').write(str(number))
  sys.exit(0)
signal.signal({number}, stop)
print('ready', flush=True)
time.sleep(100)
"""
  line = [sys.executable, '-m', 'experiments.launch.local', '-n', '1', '--', sys.executable, '-c']
  process = subprocess.Popen([*line, code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
  assert process.stdout.readline() == 'ready\n'
  process.send_signal(number)
  assert process.wait(30) == 0
  assert (tmp_path / '0').read_text() == str(int(number))


def test_dry_run_of_the_local_launcher():
  line = [sys.executable, '-m', 'experiments.launch.local', '-n', '2', '--dry-run', '--']
  code, out, _ = run(*line, 'python', '-m', 'a b')
  first, second = out.splitlines()
  assert code == 0 and first.endswith("PYTHONUNBUFFERED=1 python -m 'a b'")
  assert 'JAX_PROCESS_ID=0' in first and 'JAX_PROCESS_ID=1' in second


def arguments_of(text):
  """What the command in `text` gives to experiments.train_policy, understood by it."""
  words = shlex.split(text.replace('\\\n', ' '))
  words = words[words.index('experiments.train_policy') + 1 :]
  ends = [index for index, word in enumerate(words) if word in ('&', '&&')]
  return tyro.cli(train_policy.TrainPolicy, args=words[: ends[0]] if ends else words)


SETTINGS = {
  'TPU': 'my-tpu', 'ZONE': 'z', 'TYPE': 'v5litepod-16', 'RUNTIME': 'r', 'CLUSTER': 'c',
  'IMAGE': 'i', 'RUN': '/shared/a b', 'DRY_RUN': '1',
}  # fmt: skip


def test_tpu_vm_runs_one_command_on_all_workers():
  code, out, _ = run(LAUNCH / 'tpu_vm.sh', '--directory', '/mnt/a b', '--mesh', '8,2', **SETTINGS)
  words = shlex.split(out)
  assert code == 0
  assert words[:6] == ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'my-tpu']
  assert words[6:8] == ['--zone=z', '--worker=all'] and len(words) == 9
  assert words[8].startswith('--command=cd trm_jax && .venv/bin/python -m experiments.train_policy')
  args = arguments_of(words[8])
  assert args.hosts.distributed and args.config.mesh == '8,2' and str(args.directory) == '/mnt/a b'


def test_queued_resource_asks_and_waits():
  code, out, _ = run(LAUNCH / 'queued_resource.sh', '--spot', **SETTINGS)
  create, describe = map(shlex.split, out.splitlines())
  start = ['gcloud', 'compute', 'tpus', 'queued-resources']
  assert code == 0 and create[:6] == [*start, 'create', 'my-tpu-request']
  assert create[6:] == [
    *('--node-id=my-tpu', '--zone=z', '--accelerator-type=v5litepod-16', '--runtime-version=r'),
    '--spot',
  ]
  assert describe[:6] == [*start, 'describe', 'my-tpu-request']


def test_xpk_restarts_until_the_run_is_done():
  code, out, _ = run(LAUNCH / 'xpk.sh', 'first', '--mesh', '16,1', '--prompts', '64', **SETTINGS)
  words = shlex.split(out)
  assert code == 0 and words[:3] == ['xpk', 'workload', 'create']
  assert {'--cluster=c', '--workload=first', '--tpu-type=v5litepod-16', '--docker-image=i'} < set(
    words
  )
  args = arguments_of(words[-1])
  assert args.resume and args.hosts.distributed and args.config.mesh == '16,1'
  assert words[-1].endswith(f' && test -e {args.directory}/figure.png')


def test_slurm_starts_one_process_a_gpu_and_queues_again():
  text = (LAUNCH / 'slurm.sbatch').read_text()
  for line in (
    '--ntasks-per-node=8',
    '--gpus-per-node=8',
    '--signal=TERM@180',
    '--requeue',
    '--open-mode=append',
  ):
    assert f'#SBATCH {line}\n' in text
  code, out, _ = run(
    'bash', LAUNCH / 'slurm.sbatch', '--mesh', '16,1', '--prompts', '32', **SETTINGS
  )
  assert code == 0 and out.startswith('srun --kill-on-bad-exit=1 .venv/bin/python -m ')
  args = arguments_of(out)
  assert args.resume and args.hosts.distributed and str(args.directory) == '/shared/a b'


@pytest.mark.parametrize(
  'script, name',
  [
    ('tpu_vm.sh', 'TPU'),
    ('queued_resource.sh', 'TYPE'),
    ('xpk.sh', 'IMAGE'),
    ('slurm.sbatch', 'RUN'),
  ],
)
def test_scripts_say_what_is_missing(script, name):
  code, out, err = run('bash', LAUNCH / script, 'x', **SETTINGS | {name: ''})
  assert code != 0 and out == '' and f'{name}: set {name} to' in err


def manifest():
  return yaml.safe_load((LAUNCH / 'jobset.yaml').read_text())


def script_of(found):
  """What the manifest's container runs."""
  job = found['spec']['replicatedJobs'][0]['template']['spec']
  return job['template']['spec']['containers'][0]['args'][0]


@pytest.mark.parametrize('name', ['tpu_vm.sh', 'queued_resource.sh', 'xpk.sh', 'slurm.sbatch', ''])
def test_shellcheck_finds_nothing(tmp_path, name):
  path = LAUNCH / name if name else tmp_path / 'manifest.sh'
  if not name:
    path.write_text(script_of(manifest()))
  check = [pathlib.Path(sys.executable).with_name('shellcheck'), '--shell=bash', path]
  assert run(*check)[:2] == (0, '')
  # ... and would find something.
  bad = tmp_path / 'bad.sh'
  bad.write_text('rm -r $1/$2\n')
  assert 'SC2086' in run(*check[:-1], bad)[1]


def test_the_manifest_field_by_field():
  found = manifest()
  assert (found['apiVersion'], found['kind']) == ('jobset.x-k8s.io/v1alpha2', 'JobSet')
  assert found['metadata']['annotations'] == {
    'alpha.jobset.sigs.k8s.io/exclusive-topology': 'cloud.google.com/gke-nodepool'
  }
  assert found['spec']['failurePolicy'] == {'maxRestarts': 20}
  (job,) = found['spec']['replicatedJobs']
  job_spec = job['template']['spec']
  assert job['replicas'] == 1 and job_spec['backoffLimit'] == 0
  pod = job_spec['template']['spec']
  assert pod['restartPolicy'] == 'Never' and pod['terminationGracePeriodSeconds'] >= 60
  (container,) = pod['containers']
  chips = container['resources']['limits']['google.com/tpu']
  rows, columns = pod['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x')
  assert pod['nodeSelector']['cloud.google.com/gke-tpu-accelerator'] == 'tpu-v5-lite-podslice'
  hosts = job_spec['parallelism']
  assert job_spec['completions'] == hosts and hosts * chips == int(rows) * int(columns) == 16
  (mount,), (volume,) = container['volumeMounts'], pod['volumes']
  assert mount == {'name': volume['name'], 'mountPath': '/runs'}
  assert volume['persistentVolumeClaim'] == {'claimName': 'trm-runs'}
  assert container['command'] == ['bash', '-c']
  (script,) = container['args']
  args = arguments_of(script)
  assert args.resume and args.hosts.distributed and str(args.directory).startswith('/runs/')
  assert args.config.data_dir.startswith('/runs/')
  data, model = map(int, args.config.mesh.split(','))
  assert data * model == 16
  assert script.rstrip().endswith(f'test -e {args.directory}/figure.png')


@pytest.mark.parametrize('stopped', [True, False])
def test_the_manifests_shell_passes_sigterm_on_and_tells_stopped_from_done(tmp_path, stopped):
  """Its very script, with a stand-in for the run that draws the figure unless it is stopped."""
  script = script_of(manifest())
  (tmp_path / 'first').mkdir()
  (tmp_path / 'python').write_text(
    f'#!/bin/bash\ntrap "touch {tmp_path}/term; exit 0" TERM\ntouch {tmp_path}/up\n'
    f'while [ ! -e {tmp_path}/go ]; do sleep 0.05; done\ntouch {tmp_path}/first/figure.png\n'
  )
  (tmp_path / 'python').chmod(0o755)
  environment = os.environ | {'PATH': f'{tmp_path}:{os.environ["PATH"]}'}
  process = subprocess.Popen(
    ['bash', '-c', script.replace('/runs', str(tmp_path))], env=environment
  )
  while not (tmp_path / 'up').exists():
    assert process.poll() is None
  process.send_signal(signal.SIGTERM) if stopped else (tmp_path / 'go').touch()
  assert process.wait(30) == (1 if stopped else 0)
  assert (tmp_path / 'term').exists() == stopped


def test_every_command_the_page_and_the_scripts_show_is_understood():
  shown = [LAUNCH / name for name in ('README.md', 'tpu_vm.sh', 'xpk.sh', 'slurm.sbatch')]
  text = '\n'.join(path.read_text() for path in shown).replace('\\\n', ' ')
  found = re.findall(r'(?:train_policy|tpu_vm\.sh|xpk\.sh|sbatch) [^\n`#]*--mesh [^\n`#|]*', text)
  assert len(found) >= 7
  for line in found:
    words = shlex.split(line[line.index('--') :])
    words += [] if '--directory' in words else ['--directory', 'x']
    assert tyro.cli(train_policy.TrainPolicy, args=words).config.mesh in ('16,1', '4,1')
