"""Names that are made up are known to no policy, and nothing would ever be drawn.

A valid amount of whatever limit becomes one of a limit that there is, a valid span one that a lease may have, the name of
no lease mostly that of one that was granted, and nobody takes the policy away that all draw by. What was wrong with a
request on purpose stays wrong: only what is valid is replaced, by what is valid too.
"""

import random
import re

import schemathesis

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
UNITS_MAX = 1 << 40
LEASE = re.compile(r"[0-9a-fA-F]{64}")
# Those that were granted, the one to be asked about last; nine questions of ten are about it.
LEASES = []
LEASES_MAX = 1_000
CHANCE = random.Random(1)


def known(amounts):
    """The same amounts, small, and of limits that there are."""
    valid = isinstance(amounts, dict) and len(amounts) <= 128
    valid = valid and all(NAME.fullmatch(name) for name in amounts)
    valid = valid and all(type(units) is int and abs(units) <= UNITS_MAX for units in amounts.values())
    # A cost has no amount below zero: one that has is wrong on purpose, or a change.
    if not valid or not amounts or min(amounts.values()) < 0:
        return amounts
    return {name: 1 + units % 9 for name, units in zip(("rpm", "tpm"), amounts.values())}


def settled(ask):
    """The same request, of what there is and for as long as may be."""
    for field in ("cost", "actual", "changes"):
        if field in ask:
            ask[field] = known(ask[field])
    for field, span in (("within", 0), ("deadline", 60), ("expires_in", 60)):
        if type(ask.get(field)) in (int, float) and 0 <= ask[field] < 1 << 32:
            ask[field] = span
    return ask


def elsewhere(scope):
    """The same scope, but for the whole system's: its policy is what everybody draws by."""
    if scope.get("entity") is None and scope.get("resource") is None:
        scope["resource"] = "elsewhere"


@schemathesis.hook
def after_call(context, case, response):
    if case.path == "/v1/acquire" and response.status_code == 200:
        LEASES.append(response.json()["lease"])
    lease = (case.path_parameters or {}).get("lease")
    if lease in LEASES and (response.status_code == 410 or case.path.endswith(("/settle", "/cancel"))):
        # It stays for one more question: what has ended is asked for too.
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
