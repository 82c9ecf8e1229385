"""Train with real clients on Flower: a SuperLink and SuperNodes on this machine, `python -m fl deploy --nodes 3`."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fl.base.console import as_called, guard
from fl.base.errors import FLError
from fl.base.files import write_text
from fl.base.settings import flag_in
from fl.extensions.flower.folders import SERVER, deal_out
from fl.extensions.flower.local import deployment, progress, require, share_of_cores, write_app, write_keys
from fl.extensions.flower.remote import check_settings
from fl.runs.folder import name_new_folder
from fl.runs.summary import describe
from fl.settings import Config
from fl.settings.command_line import parse

_ABOUT = """Train with real clients on Flower (needs the extra `flower`).

Without --only: partition the data set into a folder for each node, start a
SuperLink and SuperNodes on this machine, with TLS and node authentication,
train, and stop them. The run folder is the same as with `run`. All flags of
`run` can be given as well; the flags of the data say what the nodes get.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    It is 0, or 2 for what cannot be run, or 130 on Ctrl-C.
    """
    with guard() as ended:
        ended.code = _main([*(sys.argv[1:] if argv is None else argv)])
    return ended.code


def _main(argv: list[str]) -> int:
    try:
        options, flags = _parser().parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise FLError(f"{error}: see `python -m fl deploy --help`") from None
    if options.nodes < 1 or options.quorum < 1 or options.round_timeout <= 0:
        raise FLError("--nodes, --quorum and --round-timeout are 1 or more, and above 0")
    request = parse([*flags, "--clients", str(options.nodes)])
    config = request.one_run()
    if request.resume:
        raise FLError("--resume: give the --folder of the deployment, whose run goes on if there is one")
    typed = {*map(flag_in, flags)}
    if not (config.clients.participation or "participants" in typed):
        participants = min(Config().clients.participants, options.nodes)
        flags, config = [*flags, "--participants", str(participants)], config.replace(participants=participants)
    if config.evaluation.client_models_every and "eval-client-models-every" not in typed:
        print(
            "--eval-client-models-every is 0 here: clients' models and their data are not in one place", file=sys.stderr
        )
        flags, config = [*flags, "--eval-client-models-every", "0"], config.replace(eval_client_models_every=0)
    config.check()
    check_settings(config)
    if options.only in ("keys", None):
        require()
    root = Path(options.folder or name_new_folder(request.out, None, "deploy")).resolve()
    threads = options.threads or (0 if options.only else share_of_cores(options.nodes + 1))
    if options.only == "keys":
        local_names = ["127.0.0.1", "localhost"]  # where the SuperLink's own processes reach it
        write_keys(root / "keys", options.nodes, list(dict.fromkeys([*(options.host or []), *local_names])))
    if options.only == "data" or (options.only is None and not (root / "data").exists()):
        deal_out(config, root / "data")
    if options.only in ("app", None):
        settings = {
            "flags": shlex.join(flags),
            "folder": str(root / "run"),
            "data": str(root / "data"),
            "server-data": str(root / "data" / SERVER),
            "nodes": options.nodes,
            "quorum": options.quorum,
            "round-timeout": options.round_timeout,
            "start-timeout": options.start_timeout,
            "threads": threads,
        }
        write_app(root / "app", settings)
    if options.only:
        print(f"written: {root / options.only}")
        return 0
    with deployment(root, options.nodes, threads=threads) as running:
        print(
            f"a SuperLink and {options.nodes} SuperNodes run on this machine, with {threads} "
            f"thread{'s' * (threads > 1)} each; logs and data are in {root}",
            flush=True,
        )
        run = running.run(root / "app")
        with progress(root / "run", config.rounds) as look:
            status = running.wait(run, meanwhile=look)
        log = running.log(run)
    write_text(root / "run.log", log)
    warnings, errors = (
        [line for line in log.splitlines() if line.startswith(kind)] for kind in ("warning: ", "error: ")
    )
    for line in warnings:
        print(line, file=sys.stderr)
    if status != "finished:completed":
        reason = errors[-1].removeprefix("error: ") if errors else f"see {root / 'run.log'}"
        raise FLError(f"the run ended as {status}: {reason}", code="peers")
    print(describe(json.loads((root / "run" / "summary.json").read_text())))
    print(f"run folder: {root / 'run'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    program = as_called("python -m fl deploy")
    parser = argparse.ArgumentParser(
        usage=f"{program} [--FLAG VALUE ...]",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = parser.add_argument_group("arguments").add_argument
    add("--nodes", type=int, default=3, metavar="INT", help="clients, each a SuperNode (default: 3)")
    add("--folder", metavar="FOLDER", help="of data, keys, logs and run [runs/deploy, or -2, ...]")
    add("--quorum", type=int, default=1, metavar="INT", help="clients of a round that must answer (default: 1)")
    for name, default, purpose in (("round", 600, "them"), ("start", 300, "nodes")):
        text = f"seconds to wait for {purpose} (default: {default})"
        add(f"--{name}-timeout", type=float, default=default, metavar="SECONDS", help=text)
    add("--threads", type=int, default=0, metavar="INT", help="CPU threads of a node [all, shared out]")
    only = ["data", "keys", "app"]
    add("--only", choices=only, help="write this part of what other machines need, and start nothing")
    add("--host", action="append", metavar="NAME", help="with --only keys: the SuperLink's name")
    add("-h", "--help", action="help", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
