"""Policies: what may hold, change or stop a stream while it runs. See docs/policies.md.

`blocks` is what a policy sees, `processor` what it is and does, `dialect` what a kind of stream must be able to say,
`public_events` and `openai_chunks` the two kinds there are, `stream` a stream under its policies. No service, no wire.
"""
