"""A script of completion for zsh."""

from collections.abc import Iterator, Mapping, Sequence

from tandem.cluster.cli.shells.command_words import GLOBAL, FlagWords, VerbWords

BEGIN = """\
#compdef tandem
# Completion of tandem for zsh, made by `tandem completion zsh`. All words are in it: no tandem runs.
_tandem() {
    local -a words_here
    local verb
"""
END = """\
}
if [[ $funcstack[1] == _tandem ]]; then
    _tandem "$@"
else
    compdef _tandem tandem
fi
"""


def zsh_script(verbs: Sequence[VerbWords], groups: Mapping[str, str]) -> str:
    """Makes the script."""
    first = {verb.path[0]: groups.get(verb.path[0], verb.help) for verb in verbs}
    first |= {name: flag.help for flag in GLOBAL for name in flag.names}
    lines = [_describe(2, first), "    verb=$words[2]\n"]
    for group in groups:
        own = {verb.path[1]: verb.help for verb in verbs if verb.path[0] == group}
        lines += [f"    if [[ $verb == {group} ]]; then\n", _describe(3, own)]
        lines.append('        verb="$verb $words[3]"\n        shift words\n        (( CURRENT-- ))\n    fi\n')
    lines.append('    shift words\n    (( CURRENT-- ))\n    case "$verb" in\n')
    for verb in verbs:
        arguments = f"*:argument:({' '.join(verb.choices)})" if verb.choices else "*:argument:_files"
        lines.append(f"        {_quoted(verb.name)})\n            _arguments \\\n")
        lines += [f"                {_quoted(spec)} \\\n" for flag in verb.flags for spec in _specs(flag)]
        lines.append(f"                {_quoted(arguments)}\n            ;;\n")
    return BEGIN + "".join(lines) + "    esac\n" + END


def _describe(place: int, words: Mapping[str, str]) -> str:
    items = " ".join(_quoted(f"{name}:{text}") for name, text in words.items())
    return f"""\
    if (( CURRENT == {place} )); then
        words_here=({items})
        _describe -t commands command words_here
        return
    fi
"""


def _specs(flag: FlagWords) -> Iterator[str]:
    """Yields what `_arguments` reads, one for each name."""
    words = flag.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
    for name in flag.names:
        spec = f"{'*' if flag.repeated else ''}{name}"
        if flag.value is None:
            yield f"{spec}[{words}]"
            continue
        joined = "=" if name.startswith("--") else ""
        values = f"({' '.join(flag.choices)})" if flag.choices else "_files"
        yield f"{spec}{joined}[{words}]:{flag.value.replace(':', ' ')}:{values}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
