"""Operate on models and checkpoints: `python -m surgery COMMAND`; without a command it lists them."""

import difflib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from surgery import __version__
from surgery.errors import SurgeryError, is_out_of_memory

_EXAMPLES = """\
  python -m surgery inspect torchvision:resnet50
  python -m surgery inspect torchvision:resnet50 --width 0.5 --depth 2,2,4,2 --plot resnet50.png
  python -m surgery inspect timm:vit_tiny_patch16_224 --width 0.5 --heads drop --json
  python -m surgery merge ties a.safetensors b.safetensors --base base.safetensors --out c.safetensors"""


_MODULE, _SCRIPT = "python -m surgery", "layer-surgery surgery"


def called(text: str) -> str:
    """A text in which this command is called in the way in which the user called it."""
    return text.replace(_MODULE, _SCRIPT) if Path(sys.argv[0]).stem == "layer-surgery" else text


def overview() -> str:
    """What `--help` prints."""
    from surgery.commands import COMMANDS

    first = {name: (command.__doc__ or "").splitlines()[0].rstrip(".") for name, command in COMMANDS.items()}
    wide = max(map(len, first)) + 2
    lines = [f"  {name:{wide}}{text[0].lower()}{text[1:]}" for name, text in first.items()]
    return "\n".join(
        [
            "usage: python -m surgery COMMAND ...",
            "",
            "Look at models, and operate on them and on checkpoints.",
            "",
            "commands:",
            *lines,
            "",
            "examples:",
            _EXAMPLES,
            "",
            "`python -m surgery COMMAND --help` lists all options of a command.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: that of the command, or 2 if it cannot be carried out."""
    name, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    from surgery.commands import COMMANDS  # which takes long
    from surgery.commands.flags import call

    code = None
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leaves nothing half written
    try:
        if name in ("-h", "--help"):
            print(called(overview()))
        elif name == "--version":
            print(f"layer-surgery {__version__}")
        elif name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
            raise SurgeryError(f"unknown command {name!r}: {hint}")
        else:
            code = call(COMMANDS[name], called(f"{_MODULE} {name}"), rest)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; discard what Python still flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (SurgeryError, OSError) as error:
        print(called(f"error: {error}"), file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print("error: out of memory: give a smaller model or a smaller --input", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
