"""Rewrite a launch script from torchrun to msrun. All other text of the script stays as it is."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from tessera.errors import TesseraError, nearest
from tessera_compat.mindspeed_mm.flags import FLAGS
from tessera_compat.mindspore.script_text import (
    LaunchCommand,
    LaunchOption,
    Span,
    end_of_arguments,
    launches_in,
    line_of,
    options_in,
    separator_at,
    without_comments,
)

Form = Literal["llm", "mm", "rl"]
RENAMED = {"nproc_per_node": "local_worker_num", "node_rank": "node_rank", "master_addr": "master_addr"}
RENAMED |= {"master_port": "master_port", "log_dir": "log_dir"}
_OF_MSRUN = (
    *("worker_num", "local_worker_num", "join", "cluster_time_out", "bind_core", "worker_log_name"),
    *("tail_worker_log", "sim_level", "sim_rank_id", "rank_table_file", "bind_numa"),
)
DROPPED = {
    "standalone": "msrun assumes a single machine by default",
    "rdzv_id": "msrun has no rendezvous backends",
    "rdzv_backend": "msrun starts its own scheduler",
    "use_env": "msrun sets variables only",
    "redirects": "msrun writes worker_N.log to --log_dir",
    "tee": "msrun writes worker_N.log to --log_dir; --tail_worker_log shows them",
    "max_restarts": "msrun does not restart ranks",
    "monitor_interval": "msrun always monitors its workers",
    "start_method": "msrun starts programs",
    "role": "msrun has no roles",
    "local_addr": "msrun takes --master_addr",
}
_ADDED = (("log_dir", "--log_dir msrun_log"), ("join", "--join=True"), ("bind_core", "--bind_core=True"))
_WITHOUT_VALUE = ("standalone", "use_env")


@dataclass
class ConvertedScript:
    """Store the new text, the changes, and the remaining work, as (line of the original, description)."""

    text: str
    changed: list[tuple[int, str]] = field(default_factory=list)
    by_hand: list[tuple[int, str]] = field(default_factory=list)

    def lines(self) -> list[str]:
        rows = [(line, f"line {line}: {words}") for line, words in self.changed]
        rows += [(line, f"line {line}: by hand: {words}") for line, words in self.by_hand]
        return [words for _, words in sorted(rows)]


def convert(text: str, path: str, form: Form) -> ConvertedScript:
    """Convert a launch script. A script that is converted already is not changed."""
    return _Converter(text, path, form).run()


class _Converter:
    def __init__(self, text: str, path: str, form: Form) -> None:
        self.text, self.path, self.form = text, path, form
        self.code = without_comments(text)
        self.result = ConvertedScript(text)
        self.edits: dict[Span, str] = {}

    def run(self) -> ConvertedScript:
        launches = list(launches_in(self.code))
        if not launches and self.form != "rl":
            raise TesseraError(
                "the script starts no ranks",
                where=self.path,
                allowed=["torchrun ... pretrain_vlm.py ...", "msrun ... pretrain_vlm.py ..."],
                fix="name the script with the torchrun command; --form rl for jobs that Ray starts",
                code="job.script-starts-nothing",
            )
        if not launches:
            self.result.by_hand.append((1, "Ray starts the ranks of this job: only its features are checked"))
        for launch in launches:
            self._launcher(launch)
            self._framework(launch)
            self._unknown_flags(launch)
        self._features()
        text = self.text
        for span, replacement in sorted(
            self.edits.items(), key=lambda edit: (edit[0].start, edit[0].end), reverse=True
        ):
            text = text[: span.start] + replacement + text[span.end :]
        self.result.text = text
        return self.result

    def _edit(self, span: Span, replacement: str, words: str) -> None:
        if span in self.edits:  # two commands use the same variable, which is already edited
            return
        self.edits[span] = replacement
        self.result.changed.append((line_of(self.text, span.start), words))

    def _leave(self, position: int, words: str) -> None:
        row = (line_of(self.text, position), words)
        if row not in self.result.by_hand:
            self.result.by_hand.append(row)

    # ------------------------------------------------------------------------------------------ options of the launcher

    def _launcher(self, launch: LaunchCommand) -> None:
        word = self.text[launch.launcher.start : launch.launcher.end]
        options = {option.name: option for option in launch.options_of(self.code)}
        if word == "msrun":
            return
        self._edit(launch.launcher, "msrun", f"{' '.join(word.split())} -> msrun")
        for option in options.values():
            self._option(option, options)
        local = options.get("nproc_per_node")
        # the default of torchrun is one rank, that of msrun is eight
        ranks = local.value if local and local.value else "1"
        additions = [words for name, words in _ADDED if name not in options]
        if local is None:
            additions.insert(0, "--local_worker_num 1")
        if "nnodes" not in options:
            additions.insert(0, f"--worker_num {ranks}")
        home = next((part for part in launch.options if local and part.start <= local.span.start < part.end), None)
        if home is None:
            home, last = launch.options[0], launch.launcher.end
        else:
            last = max(option.span.end for option in options_in(self.code, home))
        gap = separator_at(self.text, last - 1, home)
        self._edit(Span(last, last), "".join(gap + words for words in additions), "added " + " ".join(additions))
        self._local_world_size(ranks, home.start)

    def _option(self, option: LaunchOption, options: Mapping[str, LaunchOption]) -> None:
        name, value = option.name, option.value
        if not value and name not in _WITHOUT_VALUE and (name in RENAMED or name == "nnodes"):
            self._leave(option.span.start, f"--{name} has no value")
        if name == "nproc_per_node" and value in ("auto", "gpu", "cpu"):
            self._leave(option.span.start, f"--nproc_per_node {value}: write the number of ranks per machine")
        elif name == "nnodes":
            self._worker_num(option, options)
        elif name in RENAMED:
            words = f"--{RENAMED[name]} {value}"
            if words != self.text[option.span.start : option.span.end]:
                self._edit(option.span, words, f"--{name} -> --{RENAMED[name]}")
        elif name == "rdzv_endpoint" and value:
            host, _, port = value.strip("\"'").rpartition(":")
            words = f"--master_addr {host or value} --master_port {port}" if host else f"--master_addr {value}"
            self._edit(option.span, words, f"--rdzv_endpoint -> {words}")
        elif name == "rdzv_conf" and (seconds := re.search(r"timeout=(\d+)", value or "")):
            self._edit(option.span, f"--cluster_time_out {seconds[1]}", "--rdzv_conf -> --cluster_time_out")
        elif name in DROPPED or name == "rdzv_conf":
            reason = DROPPED.get(name, "msrun has no such settings")
            span = option.span
            if name in _WITHOUT_VALUE and value and "=" not in self.text[span.start : span.end]:
                span = Span(span.start, span.start + len(f"--{name}"))  # the option takes no value: keep the next word
            self._remove(span, f"--{name} left out: {reason}")
        elif name not in _OF_MSRUN:
            near = nearest(name, [*RENAMED, "nnodes", *DROPPED, *_OF_MSRUN])
            hint = f"; did you mean --{near}?" if near else ""
            self._leave(option.span.start, f"--{name}: unknown option of torchrun{hint}")

    def _worker_num(self, option: LaunchOption, options: Mapping[str, LaunchOption]) -> None:
        local = options.get("nproc_per_node")
        machines, ranks = (option.value or "1").strip("\"'"), ((local.value if local else None) or "1").strip("\"'")
        if ":" in machines:
            self._leave(option.span.start, f"--nnodes {machines}: msrun does not grow or shrink; write one number")
            return
        names = [re.sub(r"[${}]", "", word) for word in (machines, ranks)]
        total = next(
            (match for match in re.finditer(r"^[ \t]*(?:export[ \t]+)?WORLD_SIZE=(.*)$", self.code, re.MULTILINE)
             if all(name in match[1] for name in names) and match.start() < option.span.start),
            None,
        )  # fmt: skip
        if machines.isdecimal() and ranks.isdecimal():
            value = str(int(machines) * int(ranks))
        elif total is not None:
            value = "$WORLD_SIZE"
        else:
            value = ranks if machines == "1" else f"$(({ranks} * {machines}))"
        self._edit(option.span, f"--worker_num {value}", f"--nnodes -> --worker_num {value}")

    def _local_world_size(self, value: str, position: int) -> None:
        if re.search(r"^[ \t]*(?:export[ \t]+)?LOCAL_WORLD_SIZE=", self.code, re.MULTILINE):
            return
        line = self.text.rfind("\n", 0, position) + 1
        indent = re.match(r"[ \t]*", self.text[line:])
        words = f"export LOCAL_WORLD_SIZE={value}"
        self._edit(Span(line, line), f"{indent[0] if indent else ''}{words}\n", f"added {words}")

    # ------------------------------------------------------------------------------------------ options of the job

    def _framework(self, launch: LaunchCommand) -> None:
        end = end_of_arguments(self.code, launch.command.end, launch.command.start)
        chosen = [option for option in options_in(self.code, Span(0, len(self.code))) if option.name == "ai_framework"]
        for option in chosen:
            if option.value != "mindspore":
                self._edit(option.span, "--ai-framework mindspore", "--ai-framework -> mindspore")
        if not chosen:
            tail = self.text[launch.command.start : end]
            lines = tail.count("\n")
            gap = separator_at(self.text, end - 1, Span(launch.command.start, end)) if lines else " "
            self._edit(Span(end, end), f"{gap}--ai-framework mindspore", "added --ai-framework mindspore")

    def _unknown_flags(self, launch: LaunchCommand) -> None:
        """Report flags in the command that the entry point of MindSpeed-MM does not have."""
        command = self.code[launch.command.start : launch.command.end]
        entry = re.search(r"(?<=\s)(?:-m[ \t]+[\w.]+|\S+\.py)\b", command)
        if entry is None:
            if "$" not in command:
                self._leave(launch.launcher.start, "the command names no script")
            return
        if self.form != "mm" or not Path(entry[0]).name.startswith("pretrain_"):
            return
        for option in options_in(self.code, Span(launch.command.start + entry.end(), launch.command.end)):
            flag = f"--{option.name.replace('_', '-')}"
            if flag not in FLAGS and f"--{option.name}" not in FLAGS:
                near = nearest(flag, FLAGS)
                hint = f"; did you mean {near}?" if near else ""
                self._leave(option.span.start, f"{flag}: unknown flag{hint}")

    def _features(self) -> None:
        for option in options_in(self.code, Span(0, len(self.code))):
            for row in _features():
                if option.name != row["flag"].replace("-", "_") or not {"all", self.form} & set(row["forms"]):
                    continue
                if "value" in row and (option.value or "").strip("\"'") != row["value"]:
                    continue
                words = f"--{row['flag']}: MindSpore lacks {row['what']}"
                if "values" not in row:
                    self._leave(option.span.start, words)
                    continue
                start, end = option.span.start, option.span.end
                has_value = bool(option.value) and bool(row["values"])
                self._remove(Span(start, end if has_value else start + len(row["flag"]) + 2), f"{words}; switched off")

    def _remove(self, span: Span, words: str) -> None:
        """Remove an option. If the line contains only this option, remove the line."""
        line = self.text.rfind("\n", 0, span.start) + 1
        rest = re.compile(r"[ \t]*\\?\r?\n").match(self.text, span.end)
        if not self.text[line : span.start].strip() and rest is not None:
            span = Span(line, rest.end())
        else:
            blanks = re.compile(r"[ \t]*").match(self.text, span.end)
            span = Span(span.start, blanks.end() if blanks else span.end)
        self._edit(span, "", words)


@functools.cache
def _features() -> list[dict[str, Any]]:
    rows = yaml.safe_load(Path(__file__).with_name("features.yaml").read_text(encoding="utf-8"))
    return list(rows)
