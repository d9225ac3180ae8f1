# Written by tools/generate_stub.py from the settings of RunConfig.
from collections.abc import Callable
from os import PathLike
from typing import Any

from paceline.config import RunConfig as RunConfig
from paceline.errors import PacelineError as PacelineError
from paceline.errors import UserError as UserError
from paceline.runtimes.scripts.session import Session as Session
from paceline.runtimes.scripts.session import join as join
from paceline.tasks.metrics import Perplexity as Perplexity
from paceline.tasks.supervised import SupervisedTask as Task
from paceline.tracking.tracker import Tracker as Tracker

__all__ = ["PacelineError", "Perplexity", "RunConfig", "Session", "Task", "Tracker", "UserError", "join", "train"]

def train(
    build: Callable[[], Task] | str | None = None,
    *,
    quiet: bool = False,
    dataset: str | None = "fashion-mnist",
    split: str | None = "iid",
    shard_weights: list[float] | tuple[float, ...] | None = None,
    validation: float | None = 0.0,
    fold: str | None = None,
    data_dir: str | PathLike[str] | None = None,
    augment: str | None = "auto",
    max_length: int | None = 64,
    image_size: int | None = 224,
    model: str | None = "lenet5",
    task: str | None = None,
    weights: str | PathLike[str] | None = None,
    weights_partial: bool | None = None,
    weights_sha256: str | None = None,
    strategy: str | None = "async",
    workers: int | None = None,
    max_workers: int | None = None,
    rule: str | None = "auto",
    average: str | float | None = None,
    aggregate: str | None = None,
    robust: bool | None = False,
    local_steps: str | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    outer_warmup: int | None = None,
    path: str | None = None,
    codec: str | None = None,
    pull_codec: str | None = None,
    optimizer: str | None = "sgd",
    lr: float | None = None,
    momentum: float | None = 0.9,
    nesterov: bool | None = False,
    betas: list[float] | tuple[float, ...] | None = [0.9, 0.999],
    weight_decay: float | None = 0.0,
    clip: float | None = None,
    schedule: str | None = "constant",
    warmup: float | None = None,
    scale_lr: str | float | None = "none",
    batch_size: int | None = 32,
    epochs: float | None = 6.0,
    epoch_mode: str | None = "shared",
    steps: int | None = None,
    max_seconds: float | None = None,
    target_accuracy: float | None = None,
    target: str | None = None,
    best: str | None = None,
    eval_every: float | None = None,
    eval_train: bool | None = False,
    score: str | None = "all",
    train_score: str | None = "10000",
    seed: int | None = 0,
    device: str | None = "cpu",
    threads: int | None = None,
    precision: str | None = "fp32",
    compile: bool | None = False,
    capture: bool | None = False,
    channels_last: bool | None = None,
    accumulate: int | None = 1,
    delay: str | list[str] | None = None,
    faults: str | PathLike[str] | None = None,
    checkpoint_every: float | None = 60.0,
    keep: int | None = 2,
    restart: int | None = 0,
    restart_workers: int | None = 0,
    keep_going: bool | None = False,
    stall: float | None = None,
    recovery: str | None = "log",
    durable: bool | None = False,
    snapshots: float | None = None,
    track: str | list[str] | None = None,
    name: str | None = None,
    runs: str | PathLike[str] | None = "runs",
    mirror: str | None = None,
) -> dict[str, Any]:
    """Train and return the result (the content of result.json, with `folder` added).

    `build` returns a `paceline.Task`; workers import it by name, so it is a function at the top of a module or script.
    In a notebook, too, it is in a module, unless the workers are in this process (strategy classic, device cuda).
    Without `build`, `model` and `dataset` name built-in ones. `settings` are the flags of `paceline train`.

    Flags are written with underscores, as in `strategy="async"`, `batch_size=64`; None is the default of each. `quiet`
    shows no progress. A mistake is a `UserError`; a run that diverges or learns nothing returns, with `status`
    "diverged" or "collapsed", and its `reason` is printed as by the command line.

    dataset: fashion-mnist, mnist, cifar10, sst5, imagenet or fashion-mnist-sample
    split: how workers share the data: full, iid, labels or dirichlet:ALPHA
    shard_weights: relative shard sizes of workers, as in 1,1,2
    validation: fraction of the train set to hold out and score
    fold: hold out fold I of K of the train set and score it, not the test set, as in 2/5
    data_dir: folder that holds the data sets
    augment: augment images: crop, mirror, crop,mirror or none (auto: both for cifar10, imagenet)
    max_length: maximum number of words of a sentence
    image_size: width and height of the images of imagenet, in pixels
    model: lenet5, cnn, resnet20, resnet18, resnet34, resnet50 or resnet101 (with -gn: group norm, not batch norm),
        inception-28-small, inception-bn, or transformer (for text)
    task: your own task instead of model and dataset: MODULE:FUNCTION or FILE.py:FUNCTION
    weights: begin from the weights in this safetensors file, such as weights.safetensors of a run
    weights_partial: load the tensors of --weights that fit by name and shape, and list the others (default: all
        must fit)
    weights_sha256: refuse --weights unless the file has this SHA-256 (default: any; the run records it)
    strategy: classic, sync, async, backup:B, bounded:S, allreduce, local:H, diloco:H or async-local:H
    workers: number of workers (default 2; classic has 1)
    max_workers: let workers join and leave during the run, at most this many at once; the data is divided again
        each time (default: --workers)
    rule: how the server applies a push: auto, plain, plain-early, damped, gap, compensated, dana, dana-slim,
        cached, ringleader, ringmaster:R, buffered:K, ahead, foresight, foresight-fair or foresight-cached; with
        async-local: delayed
    average: evaluate and save a running average of the weights: none, on, auto or a horizon in updates (default: on
        for async, bounded and async-local, unless the rule is plain or plain-early or the loop is your own)
    aggregate: how to combine the pushes of a round, coordinate by coordinate: mean (default, by samples), median or
        trimmed:K (the mean without the K lowest and highest)
    robust: discard pushes whose norm is out of all proportion to the run's history, and expel who sends them
    local_steps: for strategies with :H: even (H steps each) or speed (H steps for the fastest worker, fewer for
        slower ones, so that all push at the same time; default for async-local)
    outer_lr: outer learning rate (default: diloco .7; async-local .7 with 2 workers, .4 from 5 on)
    outer_momentum: outer Nesterov momentum (default: .65 with 2 workers; from 5 on diloco .9, async-local .8)
    outer_warmup: rounds in which outer lr and momentum grow from plain averaging, 1 and 0 (default 10; 0: none, as
        published)
    path: topology (ring: default of allreduce, local and diloco)
    codec: compress pushes: none (default), fp16, bf16, int8, sign, topk:F or lowrank:R
    pull_codec: compress replies, as weight changes, with the same codecs (default none)
    optimizer: sgd, adam, adamw, rmsprop, lars or muon: on the server, or in workers if local
    lr: learning rate (default .001, sgd .005, rmsprop .0001, lars 1)
    momentum: momentum of sgd, rmsprop, lars and muon
    nesterov: Nesterov momentum for sgd
    betas: betas of adam, adamw and muon's adamw
    weight_decay: weight decay added to the gradient (adamw, muon: to steps)
    clip: maximum gradient norm; scale larger gradients down
    schedule: lr schedule: constant, cosine, exponential[:FACTOR] or steps:80,120 (/ 10)
    warmup: share of the run over which lr grows (rule auto: up to .2)
    scale_lr: multiply lr: none, auto (by the pushes that one update averages) or a factor
    batch_size: samples in one batch of one worker
    epochs: number of epochs
    epoch_mode: count epochs over all workers (shared) or over each worker's own shard (own)
    steps: stop after this many updates instead of --epochs
    max_seconds: stop after this many seconds of training, without loading and evaluation (simulate: virtual)
    target_accuracy: stop once the accuracy of an evaluation reaches this percentage (needs --eval-every)
    target: stop once a metric of an evaluation reaches a value: 'METRIC<=VALUE' or 'METRIC>=VALUE'; METRIC is loss,
        accuracy or a metric of your task (needs --eval-every), or one that your own loop reports
    best: how to choose the best weights at evaluations: min:METRIC or max:METRIC (default: the metric of --target,
        else accuracy, else loss)
    eval_every: epochs between evaluations, on what --validation or --fold holds out, else on the test data; they do
        not count as training time
    eval_train: score the train data too at each of these evaluations
    score: what to score at the end: all, test or none
    train_score: train samples to score at the end, drawn by the seed: a number, all or none
    seed: seed of all random choices
    device: cpu or cuda
    threads: threads of each worker (default: cores / workers)
    precision: fp32, or bf16 (autocast; the weights stay fp32)
    compile: compile the step with torch.compile: a slower start, then faster steps
    capture: capture the step as a CUDA graph; needs --device cuda
    channels_last: store images channels last (default: with bf16 on cuda)
    accumulate: compute each batch in this many parts, one by one, to save memory
    delay: slow workers down: 30ms or normal:60ms,5ms for all, 30ms@1,3 for workers 1 and 3, which wins; may be
        repeated
    faults: TOML file of faults to inject: crash, pause, slow and others
    checkpoint_every: seconds between checkpoints
    keep: number of checkpoints to keep
    restart: restart a killed server from checkpoint and log, at most this many times
    restart_workers: start a killed worker process again, at most this many times in the whole run
    keep_going: go on without a worker whose code raises an exception (default: the run ends)
    stall: drop a worker that makes no step for this many seconds and for 10 of its usual steps, like a lost one
        (default: only name it)
    recovery: recompute (log) or drop (checkpoint) pushes after a crash; a diverged run goes on from its newest
        checkpoint by checkpoint, or by skip-batch also without the batch that ended it
    durable: sync the log to disk before each reply, so that a power failure loses no push; 'paceline run' also
        keeps the values of pushes, which only the script could compute again
    snapshots: save the weights this many times per epoch, for 'paceline landscape'; each takes 4 bytes per
        parameter (default none)
    track: send metrics to csv, tensorboard, mlflow, wandb, otel or MODULE:CLASS; may be repeated
    name: name of the run (default: strategy, model, workers and time)
    runs: folder that holds the runs; a URL is short for --runs runs --mirror URL
    mirror: copy the run folder behind the run to URL/NAME, as in s3://BUCKET/runs (default none)
    """
