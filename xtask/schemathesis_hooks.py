"""Rewrites generated requests so that they refer to limits and leases that exist.

Generated names match no policy, so no request would ever draw. A valid amount of any limit becomes one of a configured
limit, a valid span one that a lease may have, most lease ids that of a granted lease, and no request removes the system
policy. Deliberate errors stay errors: only valid values are replaced, and only by valid ones.
"""

import random
import re

import schemathesis

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
UNITS_MAX = 1 << 40
LEASE = re.compile(r"[0-9a-fA-F]{64}")
# Granted leases, the one to use next last; nine of ten requests use it.
LEASES = []
LEASES_MAX = 1_000
CHANCE = random.Random(1)


def known(amounts):
    """The same amounts, small, and of configured limits."""
    valid = isinstance(amounts, dict) and len(amounts) <= 128
    valid = valid and all(NAME.fullmatch(name) for name in amounts)
    valid = valid and all(type(units) is int and abs(units) <= UNITS_MAX for units in amounts.values())
    # A cost has no negative amount: one that has is a deliberate error, or a delta.
    if not valid or not amounts or min(amounts.values()) < 0:
        return amounts
    return {name: 1 + units % 9 for name, units in zip(("rpm", "tpm"), amounts.values())}


def settled(ask):
    """The same request, for configured limits and with spans within the bounds."""
    for field in ("cost", "actual", "changes"):
        if field in ask:
            ask[field] = known(ask[field])
    for field, span in (("within", 0), ("deadline", 60), ("expires_in", 60)):
        if type(ask.get(field)) in (int, float) and 0 <= ask[field] < 1 << 32:
            ask[field] = span
    return ask


def elsewhere(scope):
    """The same scope, except that the system policy, which every draw uses, is never changed."""
    if scope.get("entity") is None and scope.get("resource") is None:
        scope["resource"] = "elsewhere"


@schemathesis.hook
def after_call(context, case, response):
    if case.path == "/v1/acquire" and response.status_code == 200:
        LEASES.append(response.json()["lease"])
    lease = (case.path_parameters or {}).get("lease")
    if lease in LEASES and (response.status_code == 410 or case.path.endswith(("/settle", "/cancel"))):
        # It is used once more: requests on ended leases are tested too.
        LEASES.remove(lease)
        LEASES.insert(0, lease)
        del LEASES[LEASES_MAX:]


@schemathesis.hook
def before_call(context, case, **kwargs):
    lease = (case.path_parameters or {}).get("lease")
    if isinstance(lease, str) and LEASE.fullmatch(lease) and LEASES and CHANCE.random() < 0.9:
        case.path_parameters["lease"] = LEASES[-1]
    if case.path == "/v1/policy" and case.method in ("PUT", "DELETE"):
        case.query = dict(case.query or {})
        elsewhere(case.query)
    if case.method != "POST" or not isinstance(case.body, dict):
        return
    if case.path == "/v1/apply":
        changes = case.body.get("changes")
        for change in changes if isinstance(changes, list) else []:
            if isinstance(change, dict):
                elsewhere(change)
        return
    requests = case.body.get("requests")
    for ask in requests if isinstance(requests, list) else [case.body]:
        if isinstance(ask, dict):
            settled(ask)
