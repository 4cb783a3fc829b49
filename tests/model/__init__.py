"""The protocol as a state machine: whatever may happen, in any order, against the real scripts on a real server."""
