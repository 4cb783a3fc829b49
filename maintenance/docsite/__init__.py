"""Builds the documentation site: `python -m maintenance.docsite`, or `make docs`.

`pages` gathers the pages, `reference` writes those that follow from the code, zensical makes HTML, `links` checks it.
"""
