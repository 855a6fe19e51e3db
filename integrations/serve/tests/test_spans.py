"""Spans say what a request's time was spent on, below the client's own, and nothing of what was said."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cacheblend_rag import BlendEngine, Chunk
from cacheblend_serve import spans
from integrations.serve.tests.conftest import CHUNKS, Serve

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("stream", [False, True])
def test_a_requests_spans(engine: BlendEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(spans.trace, "get_tracer", provider.get_tracer)
    engine.add([Chunk(CHUNKS["mara"], "mara")])
    body = {"messages": [{"role": "user", "content": "Where was Mara born?"}], "documents": ["mara"], "max_tokens": 3}
    client = serve(engine)
    client.post("/v1/chat/completions", json=body | {"stream": stream}, headers={"traceparent": PARENT})
    found = {span.name: span for span in kept.get_finished_spans()}
    assert {"chat/completions", "look-up", "prefill", "decode"} <= found.keys()
    whole = found.pop("chat/completions")
    assert whole.parent is not None and f"{whole.parent.trace_id:032x}" == PARENT[3:35]
    assert whole.attributes is not None and whole.attributes["cacheblend.hits"] == 1
    assert "Mara" not in str([span.to_json() for span in kept.get_finished_spans()])
    for span in found.values():
        assert span.parent is not None and span.parent.span_id == whole.context.span_id
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time
    assert found["prefill"].end_time == found["decode"].start_time
