"""The parts of `kvrelay soak`:

requests   documents with canaries, requests about them, and one exchange with the gateway
load       tenants that send requests concurrently, and the tally of all exchanges
faults     which process is killed or frozen, when, and which errors that excuses
checks     what is wrong with an exchange; the oracle of right tokens
watch      memory, descriptors, threads and tasks of every process, and their growth
run        one soak: the stack's configuration, the run, the report
"""
