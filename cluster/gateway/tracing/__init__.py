"""Traces of requests over OpenTelemetry, off by default. Nothing of OpenTelemetry is imported before they are on."""
