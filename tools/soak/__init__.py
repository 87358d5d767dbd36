"""`kvrelay soak`, in parts: what is asked, what is broken meanwhile, and what is looked at.

    talks     documents with canaries, and the requests about them
    client    one request and what came of it: an `Exchange`
    load      tenants that ask, several at once
    oracle    right tokens, from plain transformers in a process of its own
    faults    what is killed and frozen, when, and which errors that excuses
    judge     what is wrong with an exchange: `Finding`s
    samples   memory, descriptors, threads, tasks of every process, and their slopes
    report    the verdict, as a table and as JSON
"""
