"""kvrelay's gateway beside others, in front of one upstream: what each costs, adds, drops and keeps.

    python -m benchmarks.gateways --venvs DIR --json gateways.json
    python -m benchmarks.gateways --only kvrelay
    python -m benchmarks.gateways --only kvrelay --before CHECKOUT        a change, before and after
    python -m benchmarks.gateways --only kvrelay --soak --memory-requests 100000

All of them ask for an API key, and take turns in every round. The others are installed from the package index into
environments of their own under DIR, the first time they are asked for. LiteLLM gets a fiftieth of the requests that the
others get, so that a whole run takes about six minutes on two free cores.

    cpu ms    user and system time of the gateway's processes, over the requests that it answered: on a machine with
              other work the one figure that stays
    req/s     answered with every connection asking again at once
    added     to the time of the upstream alone, at a steady pace that leaves nobody waiting; a dash where the gateway
              cannot hold that pace
    dropped   of many streams at once, those that did not bring every word and the end
    RSS       resident memory before and after so many requests; with --soak nothing else is measured, and it is told
              after each tenth of them

kvrelay asks a worker for a stream, whatever its client wants; the others pass on what they get, whole answers whole.
"""
