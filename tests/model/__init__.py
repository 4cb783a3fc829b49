"""The protocol as a state machine: any events in any order, against the real scripts on a real server."""
