"""Tests: unit (no server), contract (a real server), services (one service), e2e (all of them)."""
