"""`apex completion bash`: prints a script that completes commands, options, presets and runs in a shell."""

import argparse
from collections.abc import Sequence
from contextlib import suppress

from apex.cli import COMMANDS, load
from apex.config.arguments import Parser, collect_options, reader_may_leave
from apex.config.presets import PRESETS
from apexreplay.errors import FINISHED
from apexreplay.process.lifecycle import reports_errors

ZSH = """\
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
autoload -Uz bashcompinit && bashcompinit
"""
SHELLS = {"bash": "", "zsh": ZSH}
WITH_SETTINGS = ("train", "learner", "doctor")  # commands whose options include all settings
WITH_RUN = ("evaluate", "watch", "logs", "plot", "report", "export")  # commands that take the name of a run
SCRIPT = """\
_apex() {{
  local before=${{COMP_WORDS[COMP_CWORD - 1]}} current=${{COMP_WORDS[COMP_CWORD]}} options="" names=() run
  if ((COMP_CWORD == 1)); then
    options="{commands}"
  elif [[ $before == --preset ]]; then
    options="{presets}"
  else
    case ${{COMP_WORDS[1]}} in
{options}
    esac
    case ${{COMP_WORDS[1]}} in {with_run}) names=(runs/*/) ;; esac
  fi
  COMPREPLY=($(compgen -W "$options" -- "$current"))
  for run in "${{names[@]}}"; do  # Not by compgen -W, which would execute `$(...)` in the name of a folder.
    run=${{run%/}}
    run=${{run#runs/}}
    [[ -d runs/$run && $run == "$current"* ]] && COMPREPLY+=("$(printf %q "$run")")
  done
}}
complete -o default -F _apex apex
"""


@reports_errors("apex completion")
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the completion script for the shell in `argv`."""
    parser = Parser(
        prog="apex completion",
        description='Prints a completion script. To enable it, add eval "$(apex completion bash)" to ~/.bashrc.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="bash or zsh")
    options = parser.parse_args(argv)
    with reader_may_leave():
        print(SHELLS[options.shell] + make_script(), end="")
    return FINISHED


def make_script() -> str:
    """Returns the completion script for bash, built from the options of each command."""
    lines = []
    for name, command in COMMANDS.items():
        with collect_options() as options, suppress(SystemExit):
            load(command.module)(["--help-all" if name in WITH_SETTINGS else "--help"])
        lines.append(f'      {name}) options="{" ".join(sorted(options))}" ;;')
    return SCRIPT.format(
        commands=" ".join(COMMANDS),
        presets=" ".join(PRESETS),
        options="\n".join(lines),
        with_run="|".join(WITH_RUN),
    )
