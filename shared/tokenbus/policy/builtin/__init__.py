"""Policies that come with tokenbus: rewriting, tool rules, a judge that is a model."""
