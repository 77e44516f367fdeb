"""A script of completion for fish."""

from collections.abc import Mapping, Sequence

from tandem.cluster.cli.shells.command_words import GLOBAL, FlagWords, VerbWords

BEGIN = """\
# Completion of tandem for fish, made by `tandem completion fish`. All words are in it: no tandem runs.
function __tandem_verb --description 'the command line begins with the verb ARGV'
    set -l given (commandline -opc)
    set -l last (math (count $argv) + 1)
    test (count $given) -ge $last; and test "$given[2..$last]" = "$argv"
end
function __tandem_place --description 'the next word is number N of the command line'
    test (count (commandline -opc)) -eq $argv[1]
end
complete -c tandem -e
"""


def fish_script(verbs: Sequence[VerbWords], groups: Mapping[str, str]) -> str:
    """Makes the script."""
    lines = [BEGIN]
    for name in dict.fromkeys(verb.path[0] for verb in verbs):
        words = groups.get(name) or next(verb.help for verb in verbs if verb.path == (name,))
        lines.append(f"complete -c tandem -n '__tandem_place 1' -f -a {name} -d {_quoted(words)}\n")
    lines += [_flag("__tandem_place 1", flag) for flag in GLOBAL]
    for verb in verbs:
        here = f"__tandem_verb {verb.name}"
        if len(verb.path) > 1:
            place = f"__tandem_verb {verb.path[0]}; and __tandem_place 2"
            lines.append(f"complete -c tandem -n '{place}' -f -a {verb.path[1]} -d {_quoted(verb.help)}\n")
        if verb.choices:
            lines.append(f"complete -c tandem -n '{here}' -f -a '{' '.join(verb.choices)}'\n")
        lines += [_flag(here, flag) for flag in verb.flags]
    return "".join(lines)


def _flag(when: str, flag: FlagWords) -> str:
    names = " ".join(_spelled(name) for name in flag.names)
    value = "" if flag.value is None else f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r"
    return f"complete -c tandem -n '{when}' {names}{value} -d {_quoted(flag.help)}\n"


def _spelled(name: str) -> str:
    if name.startswith("--"):
        return f"-l {name[2:]}"
    return f"-s {name[1:]}" if len(name) == 2 else f"-o {name[1:]}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
