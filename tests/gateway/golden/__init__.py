"""The golden table: how the gateway handles a request, recorded case by case.

It pins the public surface only: HTTP in, calls to fake workers out, `/metrics` and `/admin/usage`. From the gateway it
imports only `create_app` and the settings.

A case is named `route / caches / fault / form / tiers`:

    route   the request's fields and the configured policy                 `cases.ROUTES`
    caches  what earlier requests left in workers and registry             `cases.CACHES`
    fault   what goes wrong, as `where what`, joined by ` + `              `cases.WHERE`, `cases.ERRORS`
            `breaks@2` ends an answer with an error after two words, `cut@2` without one, `stalls@2` goes silent;
            `late` takes a minute, `slow` two seconds; health checks notice `down`, but not `unreachable`
    form    `whole` or `stream`
    tiers   2 or 3; `2+1` has a second worker in the large tier

A script takes several requests and is named `group / title`; its turns are labelled (`scripts.py`): conversations,
hang-ups, limits, circuits, clients that manage caches, explanations.

A recorded turn (`data/ROUTE.json`; `TABLE.md` has one line per case) has these fields:

    status, headers   of the reply; `overhead-ms` is `ms` if well-formed
    events            the kinds of the server-sent events in order; `content*7` are seven in a row
    hung_up           the client left before the end
    answer, usage     text and finish reason; token counts
    error             type, code and param, of an error reply or a stream's last frame; without the message
    report            the `kvrelay` field without nulls and false flags; `times` names the reported times
    took_s            how long the client waited, on a clock that skips every wait (see `clock`)
    calls             the calls to workers in order. `cache` is the one answered from or mapped. A flag at its default
                      is left out. `deadline_s` is the worker's time budget, `at_s` the time of the call. `got` is the
                      result: a cache and its tokens, an error, `hung up` or `given up` by the gateway
    metrics           counters and histogram counts that changed, by label values
    charged           the tenant's charges

Cache ids are `c1`, `c2`, ... and salts `s1` (left out), `s2`, ... in order of appearance, over all requests of a case,
recorded or not.

Run or debug a case:   python -m tests.gateway.golden.run "named-large / none"
Record the table:      python -m tests.gateway.golden.regenerate


"""
