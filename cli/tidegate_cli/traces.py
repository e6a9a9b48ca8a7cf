"""Recorded traffic: reading it, labelling its clients as our tenants, scaling it to a small model.

Lengths and arrivals come from a record; the tenants' names, and with them their policies, are our
labels. Scaling keeps every proportion: one factor for all lengths, one for all gaps.
"""

import csv
import gzip
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from tidegate_cli.errors import TraceError
from tidegate_cli.percentiles import percentile
from tidegate_policies.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request, recorded or to be sent.

    Attributes:
        at_seconds: Arrival, from the start of the trace.
        tenant: The source's client in a record, our tenant in a plan.
    """

    at_seconds: float
    tenant: str
    prompt_tokens: int
    output_tokens: int

    @property
    def service(self) -> float:
        """Charged service, in cost units, when it runs to its end."""
        return PROMPT_TOKEN_COST * self.prompt_tokens + OUTPUT_TOKEN_COST * self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """How long the requests of a plan are, in tokens."""

    count: int
    prompt_p50: int
    prompt_p95: int
    output_p50: int
    output_p95: int


def arena_trace() -> tuple[TraceRequest, ...]:
    """Return the shipped window of Chatbot Arena traffic (source and licence in `recorded`)."""
    with resources.as_file(resources.files("tidegate_cli") / "recorded" / "vtc_arena.csv") as path:
        return read_trace(path)


def read_trace(path: Path) -> tuple[TraceRequest, ...]:
    """Read a CSV with the columns arrival_s, tenant, prompt_tokens and output_tokens.

    One whose name ends in `.gz` is decompressed.

    Raises:
        TraceError: Missing file or column, or a value that is no number; names file and line.
    """
    requests = []
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", newline="", encoding="utf-8") as file:
            for line, row in enumerate(csv.DictReader(file), start=2):
                requests.append(_parse(row, path, line))
    except OSError as error:
        raise TraceError(error.strerror or str(error), path=path) from error
    if not requests:
        raise TraceError("holds no request", path=path)
    return tuple(requests)


def _parse(row: Mapping[str, str], path: Path, line: int) -> TraceRequest:
    try:
        return TraceRequest(
            at_seconds=float(row["arrival_s"]),
            tenant=row["tenant"],
            prompt_tokens=int(row["prompt_tokens"]),
            output_tokens=int(row["output_tokens"]),
        )
    except KeyError as error:
        raise TraceError(f"line {line}: no column {error.args[0]!r}", path=path) from error
    except (TypeError, ValueError) as error:
        raise TraceError(f"line {line}: {error}", path=path) from error


def label_clients(recorded: Sequence[TraceRequest], shares: Mapping[str, float]) -> dict[str, str]:
    """Give every client of a record to one of our tenants, so that the service asked for splits.

    The clients go one by one, largest first, to the tenant that is furthest below its share.

    Args:
        recorded: The record.
        shares: By tenant: its part of the whole service asked for; any positive unit.

    Returns:
        Our tenant by client.

    Raises:
        TraceError: The record has fewer clients than there are tenants.
    """
    service: dict[str, float] = defaultdict(float)
    for request in recorded:
        service[request.tenant] += request.service
    if len(service) < len(shares):
        raise TraceError(f"{len(service)} clients can't be {len(shares)} tenants")
    total = sum(service.values())
    missing = {t: part / sum(shares.values()) * total for t, part in shares.items()}
    labels = {}
    for client in sorted(service, key=lambda name: (-service[name], name)):
        tenant = max(missing, key=lambda name: (missing[name], name))
        labels[client] = tenant
        missing[tenant] -= service[client]
    return labels


def scale_lengths(recorded: Sequence[TraceRequest], factor: float) -> tuple[TraceRequest, ...]:
    """Multiply all lengths by `factor`, to one token at least."""
    return tuple(
        replace(
            request,
            prompt_tokens=max(1, round(request.prompt_tokens * factor)),
            output_tokens=max(1, round(request.output_tokens * factor)),
        )
        for request in recorded
    )


def relabel(
    requests: Sequence[TraceRequest], labels: Mapping[str, str]
) -> tuple[TraceRequest, ...]:
    """Put our tenants in the place of the record's clients."""
    return tuple(replace(request, tenant=labels[request.tenant]) for request in requests)


def fit_window(
    requests: Sequence[TraceRequest], *, service: float, seconds: float
) -> tuple[TraceRequest, ...]:
    """Cut off the beginning that asks for `service` and stretch its gaps to fill `seconds`.

    Args:
        requests: When they ask for too little, they come again from the start.
        service: In cost units; the last request may exceed it.
        seconds: The window's length; the last request comes before it is over.

    Raises:
        TraceError: All requests arrive at once, so there are no gaps to stretch.
    """
    window = []
    asked = 0.0
    repeated = _repeat(requests)
    while asked < service:
        window.append(next(repeated))
        asked += window[-1].service
    following = next(repeated)
    span = following.at_seconds
    if span <= 0:
        raise TraceError("all requests arrive at once, so the trace has no gaps")
    factor = seconds / span
    return tuple(replace(request, at_seconds=request.at_seconds * factor) for request in window)


def loop_window(
    window: Sequence[TraceRequest], *, seconds: float, lead_in_seconds: float
) -> Iterator[TraceRequest]:
    """Send the end of a window as a lead-in, then the whole window again and again.

    Args:
        window: Requests within `seconds`.
        seconds: How long one round takes.
        lead_in_seconds: When the first whole round begins; at most `seconds`.
    """
    for round_number in itertools.count(-1):
        for request in window:
            at_seconds = request.at_seconds + round_number * seconds + lead_in_seconds
            if at_seconds >= 0:
                yield replace(request, at_seconds=at_seconds)


def _repeat(requests: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    """Yield the requests from time 0 on; at their end they start again, without end."""
    start = requests[0].at_seconds
    # The gap before the repetition is the mean one: the record doesn't say when the next came.
    span = (requests[-1].at_seconds - start) * (1 + 1 / max(1, len(requests) - 1))
    for round_number in itertools.count():
        for request in requests:
            yield replace(request, at_seconds=request.at_seconds - start + round_number * span)


def summarize_lengths(requests: Sequence[TraceRequest]) -> LengthSummary:
    """Count the requests and take the percentiles of their lengths."""
    prompts = [request.prompt_tokens for request in requests]
    outputs = [request.output_tokens for request in requests]
    return LengthSummary(
        count=len(requests),
        prompt_p50=int(percentile(prompts, 50) or 0),
        prompt_p95=int(percentile(prompts, 95) or 0),
        output_p50=int(percentile(outputs, 50) or 0),
        output_p95=int(percentile(outputs, 95) or 0),
    )
