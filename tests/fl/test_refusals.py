"""What a command cannot do is one line that names the option, the value or the file, and nothing is written."""

import os
import shlex
import sys

import pytest
from fl_flags import TINY

import surgery.__main__
import zoo.__main__
from fl import compare, landscape, run, simulate
from fl.__main__ import main
from fl.data.__main__ import main as data
from fl.export import main as export
from fl.settings import Config

TEXT = "--dataset pydoc --model transformer --partition natural --text.vocabulary 50 --text.length 16 --width 0.125"
COMMANDS = {
    "run": lambda argv: run.main([*TINY, *argv]),
    "recipe": run.main,
    "text": lambda argv: run.main([*TINY, *TEXT.split(), *argv]),
    "landscape": landscape.main, "data": data, "compare": compare.main,
    "export": export, "fl": main, "surgery": surgery.__main__.main, "zoo": zoo.__main__.main,
}  # fmt: skip
REFUSED = [
    ("run --algorithm fedavgg", "unknown --algorithm 'fedavgg': did you mean fedavg?"),
    ("run --algorithm nope --help", "unknown --algorithm 'nope'"),
    ("run --algorithm half", "half:METHOD"),
    ("run --algorithm half.py", "half:METHOD"),
    ("run --algorithm nope", "module:METHOD"),
    ("run --partition foo", "module:KIND"),
    ("run --algorithm fedavg,fedavg", "only once"),
    ("run --algorithm indep --fedmr.secure 3", "--fedmr.secure is for fedmr"),
    ("run --algorithm heterofl --fedexp.no-last-two", "--fedexp.last-two is for fedexp"),
    ("run --architectures.no-mixed", "--architectures.mixed is for "),
    ("run --nesterov --momentum 0", "--nesterov needs a --momentum above 0"),
    ("run --optimizer adam --momentum 0.9", "--momentum is for --optimizer sgd"),  # also with its default
    (f"run --seeds {2**63}", "--seeds must be at least 0 and below 4294967296"),
    ("text --channels-last", "--channels-last is a layout of images"),
    ("run --width inf", "--width must be a finite number"),
    ("run --algorithm fedavg --clients 100000000000", "--clients"),
    ("run --algorithm fedavg --pad 10000000", "--pad"),
    ("run --algorithm fedavg --model resnet20 --depth 1000000", "blocks"),
    *((f"run --algorithm fedgen --fedgen.{what} {count}", f"--fedgen.{what} must be between ")
      for what in ("steps", "hidden", "batch", "noise") for count in (2**63 - 1, 2_000_000)),
    (f"run --fedmr.secure {2**63 - 1}", "--fedmr.secure must be between "),
    ("run --crop 8", "--crop 8"),
    ("run --dropout 0.5", "--dropout 0.5"),
    ("run --backend gpu", "unknown --backend 'gpu': there are auto, loop, workers, vmap, graphs"),
    ("run --device meta", "device 'meta'"),
    ("run --device quantum", "device 'quantum'"),
    ("run --dataset imagenet", "unknown data set 'imagenet'"),
    ("run --dataset cifar", "did you mean cifar10?"),
    ("run --round 5", "did you mean --rounds?"),
    ("run --no-flp", "did you mean --no-flip?"),
    ("run --xyzzy 1", "--help` lists the flags"),
    ("run --lr abc", "--lr FLOAT>0: 'abc'"),
    ("run --lr", "--lr needs a value"),
    ("run --rounds 3 --flip 5", "--flip takes no value"),
    ("run --flip=maybe", "--flip takes no value"),
    ("run --rounds 3 5", "5 is one word too many"),
    ("data --datase digits", "did you mean --dataset?"),
    ("run --fedmr.units layer", "did you mean --fedmr.unit?"),
    ("run --loss cross_entrop", "did you mean cross_entropy?"),
    ("export RUN", "missing: FILE:"),
    ("surgery align a.pt b.pt --out c.pt", "missing: --to FILE:"),
    ("fl deploy --nodes x", "--nodes: invalid int value: 'x'"),
    ("export nowhere a.pt", "nowhere does not exist: give a run folder"),
    ("surgery narrow a.pt", "missing: --width SHARE, --out FILE"),
    ("surgery inspect --dep 3", "did you mean --depth?"),
    ("run --dataset cifar10 --no-download --data-root /nowhere", "cifar-10-batches-py/data_batch_1"),
    ("run --participants 5", "--participants 5 of --clients 4"),
    ("run --participants 2 --participation 0.5", "--participants is for --participation 0, not for 0.5"),
    ("run --chunk 2", "--chunk is now --max-parallel-clients"),
    ("run --models_every=1", "--models-every is now --eval-client-models-every"),
    ("data digits", "--dataset digits"),
    ("data --pool", "--pool is now --pool-test-set"),
    ("run --fedmr.fraction 1", "--fedmr.fraction is now --fedmr.segment-fraction"),
    ("run --clients 50 --min-samples 11", "500 samples cannot give 50 clients 11 each"),
    ("run --clients 1000 --samples 0", "use fewer clients"),
    ("run --name 'a\0b'", "cannot be made"),
    ("run --name /tmp/x", "is not a plain name"),
    ("run --name ..", "is not a plain name"),
    ("run --fedmr.unit block", "no residual blocks"),
    ("run --resume /nowhere", "/nowhere does not exist"),
    *((f"{command} {flags}", message) for command in ("run", "data") for flags, message in (
        ("--partition iid --alpha 0.1", "dirichlet_mixture or dirichlet_sizes, not for iid"),
        ("--partition dirichlet --unequal", "--unequal is for --partition iid, not for dirichlet"),
        ("--partition iid --cluster-classes 2", "--cluster-classes is for --partition clusters"),
    )),
    ("run --attack.amplify 20", "--attack.amplify is for --attack.share above 0"),
    ("run --defence.rule median --defence.trim 0.1", "--defence.trim is for --defence.rule trimmed"),
    ("run --defence.rule median --defence.malicious 2", "--defence.malicious is for --defence.rule krum or multikrum"),
    ("run --defence.rule krum --defence.keep 2", "--defence.keep is for --defence.rule multikrum"),
    ("run --algorithm fedavg --defence.rule krum", "needs 5 models (2f + 3), and there are 2 of the participants"),
    ("run --algorithm fedfa --defence.rule krum", "fedfa averages parts of models"),
    ("run --compression.kind topk --compression.bits 4", "--compression.bits is for --compression.kind quantise"),
    ("run --compression.feedback", "--compression.feedback is for --compression.kind topk or quantise"),
    ("run --algorithm scaffold --compression.kind topk", "scaffold sends no updates of a model that may be changed"),
    (
        "run --algorithm fedfa --compression.kind topk --compression.feedback",
        "fedfa gives a client another model, or another part of it",
    ),
    ("run --privacy.delta 0.1", "--privacy.noise is for --privacy.clip above 0"),
    ("run --privacy.clip 1", "fedmr looks at single updates, or keeps more than their mean: leave --privacy.clip out"),
    ("run --algorithm fedavg --privacy.clip 1 --privacy.noise 0 --model resnet20", "running_mean is a buffer"),
    ("run --algorithm fltrust --fltrust.root 100000", "--fltrust.root 100000: all clients have "),
    ("recipe digit", "did you mean 'digits'?"),
    ("text --model cnn", "--model cnn is made for images"),
    ("text --dataset digits", "--text.vocabulary is for data sets of text"),
    ("text --partition dirichlet", "text has none: choose contiguous, dirichlet_sizes, iid, natural"),
    ("text --dataset text:a.txt", "there is no file a.txt"),
    ("text --norm batch", "transformer takes no norm"),
    ("run --algorithm fedavg,heterofl --architectures.widths 0.5,1", "fedavg gives all clients one model"),
    ("data --partition natural", "owners, such as femnist"),
    ("data --dataset pydoc --partition iid --plot a.png", "text has no classes"),
    ("data --plot split.txt", "'txt'"),
    *((f"data --plot '{name}'", "--plot" if name.strip("/.") or name == ".." else "a name") for name in
      (".", "", "/", "..", "taken.png", "pipe", "link", "dangling", "folder", "/dev/null")),
    ("landscape", "at least one run folder"),
    ("landscape RUN --points 4", "odd number"),
    ("landscape RUN --out table.png", "table.csv exists already"),
    ("landscape RUN --out ''", "give a name"),
    ("landscape RUN --out a.xyz", "'xyz'"),
    ("run --loss broken:loss", "--loss broken:loss fails: AttributeError: "),
    ("run --partition broken:partition", "--partition broken:partition fails: AttributeError: "),
    ("compare", "at least one"),
    ("compare nowhere --out taken.png", "nowhere does not exist: give a run folder"),
    ("compare taken.png", "is not a folder: give a run folder"),
    ("compare folder", "holds no run"),
    ("compare RUN --out figure.xyz", "'xyz'"),
    ("compare RUN --out nowhere/figure.png", "there is no folder"),
    ("compare RUN --out taken.png", "exists already"),
    ("compare RUN --target 70", "perplexity"),
    ("compare RUN --target nan", "neither"),
    ("export RUN model.h5", "unknown format 'h5'"),
    ("export RUN model", "a folder is for models of transformers"),
    ("export RUN taken.pt", "exists already"),
    ("export RUN nowhere/model.pt", "there is no folder"),
    ("export RUN model.onnx", "unknown format 'onnx': there are hf, peft, pt, safetensors"),
    ("export RUN model.pt --client 4", "there are clients 0 to 3"),
    ("surgery inspect torchvision:resnet18 --width nan", "width"),
    ("surgery inspect torchvision:resnet18 --input 3,99999999,99999999", "--input"),
    ("surgery inspect torchvision:resnet18 --depth 1000,1000,1000,1000", "depth"),
    ("surgery inspect torchvision:resnet18 --seconds 1e300", "--seconds"),
    ("zoo resnet18 --image-size 99999999", "image_size"),
    ("zoo resnet18 --depth 999999", "blocks"),
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = Config.of(
        algorithm="fedavg", clients=4, participants=2, rounds=1, local_epochs=1, width=0.1, batch_size=50
    )
    simulate(config, folder)
    return folder


@pytest.mark.parametrize(("command", "subject"), REFUSED, ids=[command for command, _ in REFUSED])
def test_refusals__what_a_command_cannot_do_is_one_line(trained, tmp_path, monkeypatch, capsys, command, subject):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of modules that a command imports
    for name in ("taken.png", "taken.pt", "table.csv"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "half.py").write_text("METHOD = None")
    (tmp_path / "broken.py").write_text(
        "loss = lambda outputs, targets: outputs.none\npartition = lambda task: task.none"
    )
    (tmp_path / "folder").mkdir()
    os.mkfifo("pipe")
    os.symlink("taken.png", "link")
    os.symlink("nowhere", "dangling")

    def left():
        stats = {path: path.lstat() for path in [*tmp_path.iterdir(), *trained.iterdir()]}
        return {path: (one.st_ino, one.st_size, one.st_mtime_ns) for path, one in stats.items()}

    before = left()
    program, *argv = shlex.split(command.replace("RUN", str(trained)))
    assert COMMANDS[program](argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert subject in lines[0]
    assert left() == before
