# ruff: noqa: RUF001, SIM905 - other scripts are intended; a word list is most readable as one string
"""Abbreviations whose period does not end a sentence, by language. Data only.

Includes those that models write in prose. A word that ends sentences as often as it is an abbreviation (``no.``,
``art.``) is listed only for use before a number.
"""

from __future__ import annotations

GOES_ON: dict[str, frozenset[str]] = {
    "en": frozenset(
        "mr mrs ms dr prof rev hon st mt ft gen col sgt capt lt gov sen rep pres messrs vs cf e.g i.e viz approx dept"
        " est jan feb mar apr jun jul aug sept oct nov dec".split()
    ),
    "de": frozenset(
        "hr fr frl dr prof dipl ing z.b d.h u.a o.ä u.ä i.d.r z.t v.a bzw ca evtl ggf inkl exkl max min mind nr sog str"
        " tel vgl zzgl abs allg bspw s.o s.u".split()
    ),
    "fr": frozenset("m mm mme mlle mgr dr pr st ste cf c.-à-d p.ex env av apr".split()),
    "es": frozenset("sr sra srta dr dra ud uds d dña prof p.ej aprox av avda".split()),
    "it": frozenset("sig sigg sig.ra dott dott.ssa prof avv ing p.es ca".split()),
    "pt": frozenset("sr sra srta dr dra prof profa p.ex aprox av".split()),
    "nl": frozenset("dhr mevr mw dr prof ir drs bijv bv d.w.z o.a m.b.t t.o.v ca".split()),
    "pl": frozenset("p dr prof inż np tj tzw m.in ok ul al".split()),
    "ru": frozenset("г гг ул им проф т.е т.к см напр руб тыс млн".split()),
}
"""The sentence always continues after these."""

BEFORE_NUMBER = frozenset("no nos nr p pp vol ch art sec fig eq ver par абз стр núm pág n° s".split())
"""The sentence continues after these if a digit follows, in any language."""
