"""Traces of requests, sent to an OpenTelemetry collector as OTLP over HTTP.

Imported only when there is a collector. Names are those of OpenTelemetry's semantic conventions for
generative AI (open-telemetry/semantic-conventions, docs/gen-ai/gen-ai-spans.md); what they have no
name for begins with `tidegate.`. Neither prompts nor answers nor keys are among it.
"""

import threading
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tidegate_engine.server.request_trace import PhaseSpan, RequestTrace

FLUSH_SECONDS = 2.0
"""How long an engine that ends waits for a collector to take the last spans."""


class TraceExporter:
    """Turns requests that have ended into spans, which leave in a thread of their own.

    Sampling, batches, headers and the rest are as the `OTEL_` variables of OpenTelemetry's SDK say.
    What a collector doesn't take in time is dropped.
    """

    def __init__(
        self,
        url: str,
        *,
        pool: str,
        pod: str,
        model: str,
        epoch_at: Callable[[], float],
    ) -> None:
        """Begin without a connection.

        Args:
            url: Where the collector takes traces.
            pool: `namespace/name`.
            pod: The engine's name in its pool.
            model: As clients name it.
            epoch_at: Seconds since the epoch at the engine's clock's zero, as of now.
        """
        own = {"service.name": "tidegate-engine", "service.instance.id": pod, "tidegate.pool": pool}
        self._provider = TracerProvider(
            resource=Resource(own).merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._exporter = OTLPSpanExporter(url)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("tidegate_engine")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._epoch_at = epoch_at

    def export(self, trace: RequestTrace) -> None:
        """Queue the spans of a request that has ended."""
        epoch = self._epoch_at()
        # An empty context: this process has no trace of its own that could be meant.
        parent = self._propagator.extract(trace.carrier, context=Context())
        span = self._tracer.start_span(
            f"{trace.operation} {self._model}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=self._attributes(trace),
            start_time=_nanoseconds(epoch + trace.arrived_at),
        )
        if span.is_recording():
            self._describe_end(span, trace)
            inside = set_span_in_context(span, Context())
            for phase in trace.spans:
                self._export_phase(phase, inside, epoch)
        span.end(_nanoseconds(epoch + trace.ended_at))

    def close(self) -> None:
        """Send what is queued, unless that takes too long; may be called in any thread."""
        # The SDK's own flush and shutdown wait long for a collector that is gone.
        flushing = threading.Thread(target=self._provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _attributes(self, trace: RequestTrace) -> dict[str, str | int | float]:
        return {
            "gen_ai.operation.name": trace.operation,
            "gen_ai.provider.name": "tidegate",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": trace.request_id,
            "tidegate.tenant": trace.tenant,
            **trace.parameters,
        }

    def _describe_end(self, span: Span, trace: RequestTrace) -> None:
        if trace.error:
            span.set_attribute("error.type", trace.error)
        if trace.is_our_fault:
            span.set_status(StatusCode.ERROR)
        if not trace.spans:
            return  # refused: there is no response
        span.set_attribute("gen_ai.response.model", self._model)
        span.set_attribute("gen_ai.usage.input_tokens", trace.input_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", trace.output_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", trace.cached_tokens)
        if trace.finish_reasons:
            reasons = [reason for _, reason in sorted(trace.finish_reasons.items())]
            span.set_attribute("gen_ai.response.finish_reasons", reasons)

    def _export_phase(self, phase: PhaseSpan, inside: Context, epoch: float) -> None:
        attributes: dict[str, str | int] = {"tidegate.choice": phase.choice}
        if phase.reason:
            attributes["tidegate.reason"] = phase.reason
        if phase.beneficiary_tier:
            attributes["tidegate.beneficiary_tier"] = phase.beneficiary_tier
        span = self._tracer.start_span(
            phase.phase.value,
            context=inside,
            attributes=attributes,
            start_time=_nanoseconds(epoch + phase.began_at),
        )
        span.end(_nanoseconds(epoch + phase.ended_at))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
