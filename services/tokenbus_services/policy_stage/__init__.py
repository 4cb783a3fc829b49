"""The policy stage: it judges drafts of runs that have policies. See docs/guides/policy-stage.md.

What a policy is, and what becomes of what it sends, is the library's (`tokenbus.policy`); which ruling counts, and what
is heard of it, is the parser's (`tokenbus.core.run.gated`). Here policies run.
"""
