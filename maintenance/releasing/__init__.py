"""Makes a release: `make release VERSION=…` (CONTRIBUTING.md)."""
