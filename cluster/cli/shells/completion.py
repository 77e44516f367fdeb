"""`tandem completion SHELL`: prints a script that completes verbs, flags and values in a shell.

All words stand in the script: a TAB starts no Python.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, get_args

import typer

from tandem.cluster.cli.shells.bash_script import bash_script
from tandem.cluster.cli.shells.command_words import VerbWords, groups_of, verbs_of
from tandem.cluster.cli.shells.fish_script import fish_script
from tandem.cluster.cli.shells.zsh_script import zsh_script

Shell = Literal["bash", "zsh", "fish"]
SCRIPTS: Mapping[Shell, Callable[[Sequence[VerbWords], Mapping[str, str]], str]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}
assert SCRIPTS.keys() == set(get_args(Shell))


def completion(
    ctx: typer.Context, shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell.")]
) -> None:
    """Print a script that completes commands of tandem.

    bash: eval "$(tandem completion bash)" in ~/.bashrc, or keep what is printed in
    ~/.local/share/bash-completion/completions/tandem. zsh: keep it as _tandem in a folder of $fpath. fish: keep it in
    ~/.config/fish/completions/tandem.fish. Print it anew after an upgrade.
    """
    root = ctx.find_root().command
    typer.echo(SCRIPTS[shell](verbs_of(root), groups_of(root)), nl=False)
