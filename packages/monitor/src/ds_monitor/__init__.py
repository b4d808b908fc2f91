"""Spans, counters, gauges and events that cost nothing until a sink is configured; CSV, TensorBoard, JSONL and progress sinks."""
