"""The policy stage: runs policies on the drafts of runs that have them. See docs/guides/policy-stage.md.

The library (`tokenbus.policy`) defines policies and the handling of their output; the parser
(`tokenbus.core.run.gated_run`) decides which verdicts count and what is released.
"""
