"""Render a job's statuses as the quickstart's lines of text. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from job_server.api.wire import Account, JobState, JobStatus, StageRecord, Way
from scripts.quickstart_plan import Check, committed

BAR_CELLS = 24
REASON_CELLS = 34


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How lines may look on the terminal at hand."""

    colour: bool
    unicode: bool

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour else text

    def bold(self, text: str) -> str:
        return self.paint(text, "1")

    def dim(self, text: str) -> str:
        return self.paint(text, "2")

    def green(self, text: str) -> str:
        return self.paint(text, "32")

    def red(self, text: str) -> str:
        return self.paint(text, "31")

    def yellow(self, text: str) -> str:
        return self.paint(text, "33")

    def trainers(self, count: int, most: int) -> str:
        """Return one mark per trainer, padded to the most there may be."""
        mark, gap = ("■", "·") if self.unicode else ("#", ".")
        return self.green(mark * count) + self.dim(gap * max(0, most - count))

    def bar(self, share: float) -> str:
        done = round(min(max(share, 0.0), 1.0) * BAR_CELLS)
        full, rest = ("━", "─") if self.unicode else ("=", "-")
        return self.green(full * done) + self.dim(rest * (BAR_CELLS - done))

    @property
    def tick(self) -> str:
        return self.green("✔" if self.unicode else "ok")

    @property
    def cross(self) -> str:
        return self.red("✘" if self.unicode else "NO")


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def news(before: JobStatus | None, now: JobStatus, style: Style) -> list[str]:
    """Return a line for each thing that happened between two looks at the job."""
    known = {stage.stage: stage for stage in before.stages} if before else {}
    lines = []
    for stage in now.stages:
        old = known.get(stage.stage)
        if stage.first_step_at is not None and (old is None or old.first_step_at is None):
            lines.append(_stage_line(stage, _committed_before(now.stages, stage), now, style))
        given_up = stage.outcome.startswith("abandoned")
        if given_up and (old is None or not old.outcome.startswith("abandoned")):
            lines.append(f"{style.yellow('given up')} stage {stage.stage}: {stage.outcome}")
    return lines


def _committed_before(stages: tuple[StageRecord, ...], stage: StageRecord) -> StageRecord | None:
    earlier = [each for each in committed(stages) if each.stage < stage.stage]
    return earlier[-1] if earlier else None


def _stage_line(
    stage: StageRecord, before: StageRecord | None, job: JobStatus, style: Style
) -> str:
    if before is None:
        what = style.bold("start  ")
    elif stage.way is Way.START:
        what = style.yellow("recover")
    elif stage.pods > before.pods:
        what = style.green("grow   ")
    else:
        what = style.bold("shrink ")
    parts = [
        f"{what}  stage {stage.stage:<2}",
        style.trainers(stage.trainers, job.spec.max_trainers),
    ]
    if before is not None:
        parts.append(f"goes on at step {stage.first_step:,}" if stage.first_step else "goes on")
        if stage.pause_s is not None:
            parts.append(f"paused {stage.pause_s:.2f} s")
        parts.append(f"{plural(stage.redone_steps, 'step')} redone")
    parts.append(style.dim(f"({shorten(stage.reason, 44)})"))
    return "  ".join(parts)


def workers(trainers: int, threads: int | None) -> str:
    """Return who computes; `threads` of each trainer, None: each has a GPU."""
    if threads is None:
        return f"{plural(trainers, 'trainer')} on {plural(trainers, 'GPU')}"
    return f"{plural(trainers, 'trainer')} of {plural(threads, 'thread')}"


def live_line(
    status: JobStatus,
    images_per_s: float | None,
    still_s: float,
    threads: int | None,
    style: Style,
) -> str:
    """Return the line that is painted over and over below the news.

    Args:
        images_per_s: over the last seconds; None: not known.
        still_s: since a step or a new stage was seen.
        threads: of each trainer; None: each computes on a GPU.
    """
    stage = next((each for each in reversed(committed(status.stages))), None)
    trainers = stage.trainers if stage is not None else 0
    parts = [style.trainers(trainers, status.spec.max_trainers)]
    if status.total_steps:
        parts.append(style.bar(status.step / status.total_steps))
        parts.append(f"step {status.step:,}/{status.total_steps:,}")
    else:
        parts.append(f"step {status.step:,}")
    for name, digits in (("loss", ".4f"), ("accuracy", ".3f")):
        if name in status.metrics:
            parts.append(f"{name} {status.metrics[name]:{digits}}")
    if status.state is JobState.RUNNING and stage is not None and stage.first_step_at is None:
        parts.append(style.yellow(f"trainers are starting, {still_s:.1f} s"))
    elif status.state is JobState.RUNNING:
        if images_per_s:
            parts.append(f"{images_per_s:,.0f} images/s by {workers(trainers, threads)}")
    else:
        state = status.state.value.lower().replace("_", " ")
        parts.append(style.yellow(f"{state}, {still_s:.1f} s"))
    return "  ".join(parts)


def shorten(text: str, cells: int) -> str:
    """Return `text` in at most `cells` characters; what is cut is the end."""
    text = " ".join(text.split())
    return text if len(text) <= cells else text[: cells - 3].rstrip() + "..."


def stage_table(stages: Iterable[StageRecord]) -> list[str]:
    """Return the committed stages as a table."""
    rows = [("stage", "pods", "steps", "pause", "redone", "why")]
    for stage in stages:
        span = "-"
        if stage.first_step is not None and stage.last_step is not None:
            span = f"{stage.first_step:,} to {stage.last_step:,}"
        rows.append(
            (
                str(stage.stage),
                str(stage.pods),
                span,
                "-" if stage.pause_s is None else f"{stage.pause_s:.2f} s",
                str(stage.redone_steps),
                shorten(stage.reason, REASON_CELLS),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column == len(rows[0]) - 1 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("   ".join(cells).rstrip())
    return lines


def account_line(account: Account) -> str:
    """Return where the wall clock of the job went, largest part first."""
    parts = {
        "training": account.training_s,
        "training beside a preparation": account.preparing_s,
        "cutting over": account.cutting_over_s,
        "recovering": account.recovering_s,
        "waiting": account.waiting_s,
        "paused": account.paused_s,
        "hung": account.hung_s,
        "waiting for data": account.reading_s,
        "saving": account.saving_s,
        "straggling": account.straggling_s,
    }
    shown = sorted(
        ((name, value) for name, value in parts.items() if value >= 0.05), key=lambda part: -part[1]
    )
    return f"{account.total_s:.1f} s in all: " + ", ".join(
        f"{name} {value:.1f}" for name, value in shown
    )


def check_lines(results: Iterable[Check], style: Style) -> list[str]:
    return [f"{style.tick if each.holds else style.cross} {each.text}" for each in results]
