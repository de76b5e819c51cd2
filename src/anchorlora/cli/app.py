"""The program: its commands, and its exit status (0, 1, 2, 3, or 75; see docs/reference.md)."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from importlib import import_module
from importlib.util import find_spec

import click

import anchorlora
from anchorlora.cli.console import WIDTH, err, libraries_in_words
from anchorlora.cli.signals import INTERRUPTED
from anchorlora.cli.user_file import users_files_answer_for_themselves
from anchorlora.errors import (
    NO_ROOM,
    AnchorloraError,
    Failed,
    Interrupted,
    MissingExtra,
    Stopped,
    TakenOver,
    Unwritten,
    nearest_names,
)
from anchorlora.processes import following

FAILED, WRONG, STOPPED = 1, 2, 3
STATUSES = (((Failed, Unwritten, TakenOver), FAILED), (Stopped, STOPPED), (Interrupted, INTERRUPTED), (AnchorloraError, WRONG))
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what a system says to a write that was well asked


OUT_OF_TABLE = "index out of range in self"  # what torch says of a row that an embedding does not have
NUMBERS = re.compile(r"not a valid (integer|float)( range)?")  # as click says it
COMMANDS = {  # name -> module, or module:function where the name differs; in the order of help
    "train": "anchorlora.cli.train",
    "ask": "anchorlora.cli.ask",
    "run": "anchorlora.cli.run",
    "grid": "anchorlora_lab.cli.grid",
    "trace": "anchorlora_lab.cli.trace",
    "select": "anchorlora_lab.cli.select",
    "status": "anchorlora_lab.cli.status",
    "report": "anchorlora_lab.cli.report",
    "frontier": "anchorlora_lab.cli.frontier",
    "methods": "anchorlora.cli.methods",
    "cores": "anchorlora.cli.cores",
    "check": "anchorlora.cli.check",
    "measure": "anchorlora.cli.check",
    "audit": "anchorlora.cli.audit",
    "eval": "anchorlora_lab.cli.eval:eval_",  # Python has a function called eval
    "export": "anchorlora.cli.export",
    "data": "anchorlora.cli.data",
}
LAB = "anchorlora_lab"
OF_LAB = (LAB, "matplotlib", "tabulate")  # the laboratory and what its extra installs


def _missing(module: str) -> list[str]:
    """Packages that a command's module needs and that are not installed."""
    return [name for name in OF_LAB if find_spec(name) is None] if module.startswith(LAB) else []


class Commands(click.Group):
    """A group that imports a command only when it is used, and suggests the nearest names for an unknown one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands that are installed."""
        return [name for name, module in COMMANDS.items() if not _missing(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in COMMANDS:
            near = nearest_names(cmd_name, COMMANDS, most=2, cutoff=0.5)
            raise click.UsageError(f"there is no command {cmd_name!r}; {near}", ctx)
        module, _, function = COMMANDS[cmd_name].partition(":")
        if missing := _missing(module):
            raise MissingExtra(
                f"anchorlora {cmd_name} is part of the laboratory, which is not installed (no {', '.join(missing)}): "
                "pip install 'anchorlora[lab]'"
            )
        return getattr(import_module(module), function or cmd_name)


START = """\
Teach a model a skill and keep what it can do; the verdict is runs/news/index.html:
  anchorlora train MODEL --data news.jsonl --keep self --out runs/news

Compare methods on a sequence of tasks; mini comes with the package and takes half a minute per run:
  anchorlora run mini --method sfor --out runs/sfor
  anchorlora grid mini --methods seq-lora,sfor --out runs/grid

Check what training changed in an adapter, and whether old directions were protected:
  anchorlora audit adapters/old adapters/new --cores old-cores.safetensors

anchorlora --help lists all commands; anchorlora COMMAND --help explains one.
"""


@click.group(
    cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH}
)
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks.")
@click.version_option(anchorlora.__version__, message="%(version)s")
@click.pass_context
def app(ctx: click.Context, verbose: bool) -> None:
    """Continual LoRA fine-tuning that protects earlier tasks and measures how well it does."""
    if ctx.invoked_subcommand is None:
        click.echo(START, nl=False)


@libraries_in_words()
def main(arguments: list[str] | None = None) -> int:
    """Run one command line. Whatever goes wrong is one line on stderr, with a traceback only under -v."""
    arguments = sys.argv[1:] if arguments is None else arguments
    verbose = arguments[:1] in (["-v"], ["--verbose"])
    try:
        with users_files_answer_for_themselves():
            status = app(arguments, standalone_mode=False, prog_name="anchorlora")
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as asked:
        print(asked.format_message())
        return 0
    except click.NoSuchOption as error:
        return _say(_unknown_option(error), WRONG, verbose)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        words = NUMBERS.sub(lambda match: f"not a {'whole ' * (match[1] == 'integer')}number", error.format_message())
        return _say(f"{words} (see {context.command_path if context else 'anchorlora'} --help)", WRONG, verbose)
    except AnchorloraError as error:
        status = next(status for kinds, status in STATUSES if isinstance(error, kinds))
        return _say(f"stopped: {error}" if status == STOPPED else str(error), status, verbose)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted; the same command continues from the last save", INTERRUPTED, verbose)
    except OSError as error:
        status = FAILED if error.errno in REFUSED else WRONG
        message = f"{error.strerror or error}: {error.filename}" if error.filename else str(error)
        if isinstance(error, (NotADirectoryError, FileExistsError)):
            message += "; a file is where a folder must be: choose another path"
        return _say(message, status, verbose)
    except Exception as error:
        return _say(_crash(error), FAILED, verbose, everywhere=True)


def _unknown_option(error: click.NoSuchOption) -> str:
    from anchorlora.cli.options import nearest_option

    assert error.ctx is not None
    near = nearest_option(error.ctx.command, error.option_name)
    return f"there is no option {error.option_name}{f'; nearest: {near}' if near else ''} (see {error.ctx.command_path} --help)"


def _crash(error: Exception) -> str:
    message = f"{type(error).__name__}: {error!s:.500}" if str(error) else type(error).__name__
    if type(error).__name__ in NO_ROOM:
        return f"{message}; there is not enough memory: free some, or ask for less (`anchorlora run .. --dry-run` tells how much)"
    if OUT_OF_TABLE in message:  # of tokens, those of the data were compared before
        return f"{message}; the model has no position for so long a text: lower max_tokens (--max-length) or max_new_tokens"
    return f"{message}; this is a bug in anchorlora: run `anchorlora -v ...` again and report the traceback"


def _say(message: str, status: int, verbose: bool, *, everywhere: bool = False) -> int:
    if following() and not everywhere:  # the first process of the run says the same
        return status
    if verbose:
        err.print(traceback.format_exc())
    err.print("error: " + " ".join(message.split()), style="red" if status != INTERRUPTED else None)
    return status
