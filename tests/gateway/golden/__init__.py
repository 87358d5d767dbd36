"""The golden table: what the gateway does with a request, recorded case by case.

It pins the public surface only: HTTP in, calls to fake workers out, `/metrics` and `/admin/usage`. It imports nothing
of the gateway but `create_app` and the settings.

A case is named `route / caches / fault / form / tiers`:

    route   what the client asks for, and which policy decides             `cases.ROUTES`
    caches  what earlier requests have left in workers and registry        `cases.CACHES`
    fault   what goes wrong, as `where what`, joined by ` + `              `cases.WHERE`, `cases.ERRORS`
            `breaks@2` ends an answer with an error after two words, `cut@2` without one, `stalls@2` goes silent;
            `late` takes a minute, `slow` two seconds; `down` is noticed by the health checks, `unreachable` is not
    form    `whole` or `stream`
    tiers   2 or 3; `2+1` has a second worker in the large tier

What takes several requests is a script, named `group / title`, whose turns are labelled (`scripts.py`): conversations,
hang-ups, bounds, circuits, clients that manage caches, explanations.

A recorded turn (`data/ROUTE.json`; `TABLE.md` has one line for each case) holds:

    status, headers   of the reply; `overhead-ms` is `ms` if well-formed
    events            the kinds of the server-sent events in order; `content*7` are seven in a row
    hung_up           the client left before the end
    answer, usage     text and finish reason; token counts
    error             type, code and param, as a reply or as a stream's last frame; no wording
    report            the `kvrelay` field: no nulls, no false flags; `times` lists the times that were reported
    took_s            how long the client waited, on a clock that skips every wait (see `clock`)
    calls             the calls to workers in order. `cache` is the one that is answered from or mapped. A flag at its
                      default is left out. `deadline_s` is what the worker is allowed, `at_s` when it was called.
                      `got` is what came back: a cache and its tokens, an error, `hung up` or `given up` by the gateway
    metrics           counters and counts of histograms that changed, by the values of their labels
    charged           what the tenant is charged for

Cache ids are `c1`, `c2`, ... and salts `s1` (left out), `s2`, ... in the order in which they appear, over all requests
of a case, recorded or not.

Run or debug a case:   python -m tests.gateway.golden.run "named-large / none"
Record the table:      python -m tests.gateway.golden.regenerate

A row in `test_golden.WRONG_TODAY` holds what is right, and not what happens.
"""
