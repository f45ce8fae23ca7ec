"""The account as a table for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from tessera.train.profile.account import Account, Row
from tessera.train.profile.memory import Timeline
from tessera.train.profile.owners import Owner

_LEAST = 0.0005  # rows with a smaller share are added up in one


def as_text(account: Account, sentences: list[str], timeline: Timeline | None, title: str) -> str:
    whose = "device" if account.accelerated else "the step's thread"
    lines = [title, ""]
    lines += [f"- {sentence}" for sentence in sentences]
    lines += [
        "",
        f"milliseconds of one step ({account.window_ns / account.steps / 1e6:.2f} in all), time of {whose}",
        "",
    ]
    owners = sorted(account.owners.items(), key=lambda one: -one[1].ns)
    lines += _rows("by module", [(_cells(owner), row) for owner, row in owners], account)
    kinds = sorted(account.kinds.items(), key=lambda one: -one[1].ns)
    lines += ["", *_rows("by kind of work", [((kind, ""), row) for kind, row in kinds], account)]
    if account.idle_while:
        lines += ["", "the device was idle while the host was in"]
        idle = sorted(account.idle_while.items(), key=lambda one: -one[1])[:8]
        lines += [f"  {_ms(account, ns):>10.2f}  {ns / account.window_ns:>6.1%}  {owner}" for owner, ns in idle]
    if timeline is not None:
        lines += ["", f"memory: {_size(timeline.peak)} at most, in {timeline.peak_phase}; held then by"]
        lines += [f"  {_size(size):>12}  {size / timeline.peak:>6.1%}  {name}" for name, size in timeline.holders[:15]]
    return "\n".join(lines) + "\n"


def _rows(title: str, rows: list[tuple[tuple[str, str], Row]], account: Account) -> list[str]:
    shown = [(cells, row) for cells, row in rows if account.share(row) >= _LEAST]
    width = max([len(title), *(len(cells[0]) for cells, _ in shown)])
    count = "kernels" if account.accelerated else "calls"
    lines = [f"{title:<{width}}  {'':<9}  {'ms':>10}  {'share':>6}  {count:>8}  {'TFLOP/s':>8}"]
    for (name, direction), row in shown:
        rate = "" if row.rate is None else f"{row.rate / 1e12:.3g}"
        each = row.count / account.steps
        lines.append(
            f"{name:<{width}}  {direction:<9}  {_ms(account, row.ns):>10.2f}  {account.share(row):>6.1%}  "
            f"{each:>8,.0f}  {rate:>8}".rstrip()
        )
    rest = sum(row.ns for _, row in rows) - sum(row.ns for _, row in shown)
    if rest:
        small = f"{len(rows) - len(shown)} smaller"
        lines.append(f"{small:<{width}}  {'':<9}  {_ms(account, rest):>10.2f}  {rest / account.window_ns:>6.1%}")
    return lines


def as_json(account: Account, sentences: list[str], timeline: Timeline | None, about: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        **about,
        "step_ms": _ms(account, account.window_ns),
        "verdict": sentences,
        "kernels_per_step" if account.accelerated else "operations_per_step": account.launches / account.steps,
        "device_waits_per_step": account.waits / account.steps,
        "modules": [
            {"name": owner.name, "direction": owner.direction, **_numbers(account, row)}
            for owner, row in sorted(account.owners.items(), key=lambda one: -one[1].ns)
        ],
        "kinds": [
            {"name": kind, **_numbers(account, row)}
            for kind, row in sorted(account.kinds.items(), key=lambda one: -one[1].ns)
        ],
        "idle_while": [
            {"name": owner.name, "direction": owner.direction, "ms": _ms(account, ns)}
            for owner, ns in sorted(account.idle_while.items(), key=lambda one: -one[1])
        ],
        "hidden_communication_ms": _ms(account, account.hidden_collectives_ns),
    }
    if timeline is not None:
        told["memory"] = {
            "peak_bytes": timeline.peak,
            "peak_phase": timeline.peak_phase,
            "held_by": [{"name": name, "bytes": size} for name, size in timeline.holders],
        }
    return told


def _numbers(account: Account, row: Row) -> dict[str, Any]:
    return {
        "ms": _ms(account, row.ns),
        "share": account.share(row),
        "count": row.count / account.steps,
        "tflops": None if row.rate is None else row.rate / 1e12,
    }


def _cells(owner: Owner) -> tuple[str, str]:
    return owner.name, owner.direction


def _ms(account: Account, ns: int) -> float:
    return ns / account.steps / 1e6


def _size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
