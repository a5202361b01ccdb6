"""The command line: ``aiodist run``, ``rendezvous``, ``demo``, ``bench`` and ``info``."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
from typing import Any, NoReturn

import click

__all__ = ["bench", "cli", "demo", "info", "main", "rendezvous", "run"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="aiodist", prog_name="aiodist")
def cli() -> None:
    """Async-first collective communication for Python."""


@cli.command(context_settings={"allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="Number of ranks to start on this host.")
@click.option("-m", "--module", is_flag=True, help="TARGET is a module, run as by python -m.")
@click.option("--job", help="Name of the job.  [default: a random one]")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the rendezvous; 0 takes a free one.", show_default=True)
@click.option("--page", is_flag=True, help="Print the link to the page that shows the job live.")
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(ranks: int, module: bool, job: str | None, port: int, page: bool, target: str, args: tuple[str, ...]) -> NoReturn:
    """Run a Python script on N ranks.

    Starts TARGET with ARGS once per rank and ends when all ranks have ended.

    What a rank prints is prefixed by its number. Rank 0 reads this command's standard input, the others /dev/null. The first rank that
    fails ends the rest and decides the exit code: the rank's own, or 128 + the signal that ended it. Ctrl-C and SIGTERM are passed on to
    all processes of all ranks; after 3 s they are killed.
    """
    signal.signal(signal.SIGINT, _leave)  # until the supervisor has its own handlers there is nothing to end
    from aiodist.launch import run_ranks

    if not module and not os.path.exists(target):
        raise click.UsageError(f"there is no script {target!r}")
    try:
        result = run_ranks(
            [sys.executable, *(["-m"] if module else []), target, *args],
            ranks,
            job=job,
            port=port,
            page=page,
            stdin=subprocess.DEVNULL if sys.stdin is None else None,
        )
    except OSError as error:
        raise click.ClickException(f"the ranks could not be started: {error}") from error
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # all is done: a late signal must not change the exit code
        signal.signal(signum, signal.SIG_IGN)
    sys.exit(result.exit_code)


def _leave(signum: int, frame: object) -> NoReturn:
    os._exit(128 + signum)


@cli.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option("--token", envvar="AIODIST_TOKEN", help="Bearer token that clients must give; `ps` shows it.  [env: AIODIST_TOKEN]")
@click.option("--token-file", type=click.Path(dir_okay=False), help="File that holds the token, for its owner's eyes only.")
@click.option("--tls-cert", type=click.Path(dir_okay=False), help="PEM file with the certificate to serve https by.")
@click.option("--tls-key", type=click.Path(dir_okay=False), help="PEM file with its private key.")
@click.option("--insecure", is_flag=True, help="Serve other hosts without a token: whoever reaches the port may join and read everything.")
@click.option("--state", type=click.Path(file_okay=False), help="Directory that keeps the jobs, so that a restart goes on with them.")
@click.option("--log-json", is_flag=True, help="Write the log as JSON, an object a line.")
def rendezvous(log_json: bool, token: str | None, token_file: str | None, **options: Any) -> NoReturn:
    """Serve the rendezvous until a signal ends it.

    The first line of standard output is its address, for AIODIST_RENDEZVOUS; the log goes to standard error. On a terminal the link to
    the page that shows the jobs is printed too, with the token in it. Members find the CA of a certificate of your own by AIODIST_TLS_CA.
    """
    import asyncio

    from aiodist.rendezvous.tls import read_token

    host, port = options["host"], options["port"]
    _log_to_stderr(log_json)
    try:
        options["token"] = token if token_file is None else read_token(token_file)
        signum = asyncio.run(_serve(options))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"can not serve on {host} port {port}: {error}") from error
    sys.exit(128 + signum)


def _log_to_stderr(as_json: bool) -> None:
    import logging

    from aiodist.rendezvous.logs import JsonLines

    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("aiodist")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


async def _serve(options: dict[str, Any]) -> int:
    """Serve with these arguments of `RendezvousServer` until a signal, and return its number."""
    import asyncio
    import resource

    from aiodist.rendezvous.server import RendezvousServer

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(signum: int) -> None:
        if not ended.done():
            ended.set_result(signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, end, signum)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # A connection is a descriptor; many systems begin with 1024.
    async with RendezvousServer(**options) as server:
        click.echo(server.address)
        if sys.stderr.isatty():
            click.echo(f"Watch the jobs at {server.page_link()}", err=True)
        failed = asyncio.create_task(server.wait())
        await asyncio.wait((ended, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()  # its state could not be written
        return await ended


@cli.command()
@click.option("-n", "--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--epochs", type=click.IntRange(min=1), default=12, show_default=True, help="Passes over the images.")
@click.option("--plot", default="aiodist-demo.png", show_default=True, help="File for the picture.")
def demo(ranks: int, epochs: int, plot: str) -> NoReturn:
    """Train a network data-parallel, then on one process.

    It learns scikit-learn's handwritten digits, which come with that package. Both trainings are compared, and a picture of loss and
    timeline is written. Needs scikit-learn and matplotlib: `pip install 'aiodist[demo]'`.
    """
    from aiodist.demo import main as demo_main

    sys.exit(demo_main(ranks=ranks, epochs=epochs, plot=plot))


@cli.command()
@click.option(
    "-n",
    "--ranks",
    type=click.IntRange(min=2),
    multiple=True,
    default=[2],
    show_default=True,
    help="Number of ranks. With --tune, -n may be given several times.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="How many times each call is measured.")
@click.option("--tune", type=click.Path(dir_okay=False, writable=True), help="Find this machine's tuning and write it to this file.")
def bench(ranks: tuple[int, ...], rounds: int, tune: str | None) -> None:
    """Measure the collectives, and check every result.

    With --tune, tunings are compared in worlds of their own, in turns, and the default is kept unless another is clearly better. Set
    AIODIST_TUNING to the file that is written. Nothing else should run meanwhile.
    """
    from aiodist.bench import Failed, measure

    if tune is None and len(ranks) > 1:
        raise click.UsageError("--ranks is given once, unless there is --tune")
    try:
        if tune is not None:
            _tune(tune, ranks, rounds)
            return
        from rich.console import Console

        from aiodist.bench.table import quick_plan, table

        found = measure(quick_plan(rounds), ranks[0])
    except (Failed, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    Console().print(table(found, ranks[0]))
    if any(one.wrong for one in found):
        raise click.ClickException("results were wrong")


def _tune(path: str, ranks: tuple[int, ...], rounds: int) -> None:
    from aiodist.bench import machine
    from aiodist.bench.tune import tune
    from aiodist.profile import FORMAT, Profile, write_profile

    rows = [tune(one, rounds, click.echo) for one in dict.fromkeys(ranks)]
    write_profile(path, Profile(FORMAT, rows, machine()))
    click.echo(f"Written to {path}. Set AIODIST_TUNING={os.path.abspath(path)} for the ranks.")


@cli.command()
def info() -> None:
    """Show the installation and the machine."""
    facts = _facts()
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        click.echo(f"{name:{width}}  {text}")


def _facts() -> list[tuple[str, str]]:
    import platform
    import socket

    cores = len(os.sched_getaffinity(0))
    facts = [
        ("aiodist", _version("aiodist")),
        ("core", _core()),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        *((name, _version(name)) for name in ("numpy", "aiohttp", "msgspec", "uvloop")),
        ("host", f"{socket.gethostname()}, {platform.system()} {platform.release()}, {platform.machine()}"),
        ("cores", f"{cores} of {os.cpu_count()} usable"),
        ("memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"),
    ]
    names = sorted(name for name in os.environ if name.startswith("AIODIST_"))
    facts += [(name, "(set)" if name == "AIODIST_TOKEN" else os.environ[name]) for name in names]
    return facts


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _core() -> str:
    try:
        from aiodist import _core
    except ImportError as error:
        return f"can not be loaded: {error}"
    return f"{_core.__file__} (kernels for {_core.instruction_set()})"


def main() -> NoReturn:
    """Run the command line and exit: 2 for wrong usage, 130 for Ctrl-C, else what the command says."""
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(130)
    sys.exit(0)
