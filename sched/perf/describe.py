"""Step-time models as plain data, so that another process can predict as they do. What they learned from stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from ..api.errors import InvalidValue
from ..api.perf import Form, PerfModel
from .buckets import Buckets, Padded
from .drafted import Drafted
from .learned import LearnedModel
from .linear import LinearForm, LinearModel
from .model import Coefficients, Corrected
from .poly import Polynomial
from .roofline import Roofline, Term
from .scaled import Scaled
from .table import TableModel

Description = Sequence[Any]  # the kind, and numbers, texts and sequences of them


def describe(model: PerfModel) -> Description:
    """Return what `restore` needs to predict as `model` does now. Raises InvalidValue for an unknown model."""
    if isinstance(model, Drafted):
        return "drafted", describe(model.inner), [[*cell, ratio] for cell, ratio in model.ratios.items()], model.version
    if isinstance(model, Scaled):
        return "scaled", describe(model.model), model.factor
    if isinstance(model, TableModel):
        return "table", *model.filled(), model.prefill_rate, model.version
    if isinstance(model, Corrected):
        return _form(model.form), model.ratio, model.prefill_rate, model.version
    if isinstance(model, LearnedModel | LinearModel):
        return _form(model.form), 1.0, model.prefill_rate, model.version
    raise InvalidValue(f"step-time model {type(model).__name__} has no description", "perf")


def restore(given: Description) -> PerfModel:
    """Return a model with the predictions of the described one."""
    match given:
        case ["drafted", inner, cells, version]:
            return Drafted.known(restore(inner), {(drafts, size): ratio for drafts, size, ratio in cells}, version)
        case ["scaled", inner, factor]:
            return Scaled(restore(inner), factor)
        case ["table", batches, lengths, lookup, seconds, rate, version]:
            return TableModel.known(batches, lengths, seconds, lookup=lookup, prefill_rate=rate, version=version)
        case [form, ratio, rate, version]:
            return Corrected.known(_formed(form), ratio, rate, version)
    raise InvalidValue(f"{given!r} describes no step-time model", "perf")


def _form(form: Form) -> Description:
    if isinstance(form, Padded):
        return "padded", astuple(form.coefficients), form.buckets.decode, form.buckets.mixed, form.factors
    if isinstance(form, Roofline):
        return "roofline", [tuple(term) for term in form.terms], form.context
    if isinstance(form, Coefficients | Polynomial | LinearForm):
        return type(form).__name__, *astuple(form)
    raise InvalidValue(f"form {type(form).__name__} of a step-time model has no description", "perf")


def _formed(given: Description) -> Form:
    match given:
        case ["padded", coefficients, decode, mixed, factors]:
            buckets = Buckets(tuple(decode), tuple(mixed))
            return Padded(Coefficients(*coefficients), buckets, None if factors is None else tuple(factors))
        case ["roofline", terms, context]:
            return Roofline(tuple(Term(*term) for term in terms), context)
        case ["Coefficients", *values]:
            return Coefficients(*values)
        case ["Polynomial", *values]:
            return Polynomial(*values)
        case ["LinearForm", *values]:
            return LinearForm(*values)
    raise InvalidValue(f"{given!r} describes no form of a step-time model", "perf")
