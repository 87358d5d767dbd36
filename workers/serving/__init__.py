"""From a request of the contract to its answer: prompt, reuse, reading, writing, keeping. Knows no HTTP."""
