"""A script of completion for bash."""

from collections.abc import Iterable, Mapping, Sequence

from tandem.cluster.cli.shells.command_words import GLOBAL, FlagWords, VerbWords

BEGIN = """\
# Completion of tandem for bash, made by `tandem completion bash`. All words are in it: no tandem runs.
_tandem() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD - 1]}" verb="${COMP_WORDS[1]}"
    local flags="" with_value="" values="" first=2
    COMPREPLY=()
    if [[ $word == "=" ]]; then  # --flag=
        word=""
    elif [[ $before == "=" ]]; then  # --flag=wor
        before="${COMP_WORDS[COMP_CWORD - 2]}"
    fi
"""
END = """\
    if [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$word"))
    elif [[ $word == -* && " $with_value " != *" $before "* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$word"))
    fi
}
complete -o default -F _tandem tandem  # files where there is no word
"""


def bash_script(verbs: Sequence[VerbWords], groups: Mapping[str, str]) -> str:
    """Makes the script."""
    first = [*dict.fromkeys(verb.path[0] for verb in verbs), *_names(GLOBAL)]
    lines = [_choose("COMP_CWORD == 1", first)]
    for group in groups:
        own = [verb.path[1] for verb in verbs if verb.path[0] == group]
        lines.append(f"    if [[ $verb == {group} ]]; then\n    {_choose('COMP_CWORD == 2', own)}")
        lines.append(f'        verb="{group} ${{COMP_WORDS[2]}}" first=3\n    fi\n')
    lines.append('    case "$verb" in\n')
    for verb in verbs:
        with_value = _names(flag for flag in verb.flags if flag.value is not None)
        lines.append(f'        "{verb.name}")\n')
        lines.append(f'            flags="{" ".join(_names(verb.flags))}"\n')
        lines.append(f'            with_value="{" ".join(with_value)}"\n            ;;\n')
    lines.append('    esac\n    case "$verb $before" in\n')
    for verb in verbs:
        for flag in verb.flags:
            if flag.choices:
                places = " | ".join(f'"{verb.name} {name}"' for name in flag.names)
                lines.append(f'        {places}) values="{" ".join(flag.choices)}" ;;\n')
    lines.append("    esac\n")
    for verb in verbs:
        if verb.choices:
            place = f'$verb == "{verb.name}" && COMP_CWORD -eq first && $word != -*'
            lines.append(f'    if [[ {place} ]]; then values="{" ".join(verb.choices)}"; fi\n')
    return BEGIN + "".join(lines) + END


def _names(flags: Iterable[FlagWords]) -> list[str]:
    return [name for flag in flags for name in flag.names]


def _choose(when: str, words: Iterable[str]) -> str:
    return f"""\
    if (( {when} )); then
        COMPREPLY=($(compgen -W "{" ".join(words)}" -- "$word"))
        return
    fi
"""
