"""Traces and metrics for OpenTelemetry."""
