"""The control plane: where the ranks of a job find each other, exchange small values, wait for each other and hear of failures.

The modules are imported by name, because importing this package loads neither aiohttp nor an event loop:

    messages    what travels between a member and the server
    told        answers that are kept until their member has them
    identity    which process a member is, and how it may be
    job         one job's records: members, keys, barriers, gathers
    news        fates that the others are yet to be told
    refusals    why members are refused, in words
    waits       what waits: requests, and members that are away
    records     what is written down of worlds, and worlds made of it
    calls       keys, barriers and gathers of all worlds
    state       the state machine over all jobs; no I/O and no clock
    journal     the file that holds what is written down
    tls         secrets in files, TLS contexts, and what a failed handshake means
    interfaces  this host's network interfaces, and what others may call it
    sockets     spellings of addresses, listening
    pulse       heartbeats: who is alive, and where in its work
    behind      who is alive and stuck: others wait for a call of it
    views       what people may see of the jobs, as types
    logs        events, and their lines of JSON
    metrics     what is counted, and how it looks to Prometheus
    lobby       connections that wait for a request
    openapi     the description of the HTTP API
    http        the page, the API and metrics over HTTP
    xml_calls   XML-RPC bodies
    xml_door    the calls of `aiodist.sync`, answered over XML-RPC
    connection  the server's end of a member's WebSocket
    server      `RendezvousServer`, the aiohttp application around the state machine
    link        opening a connection to a server, and telling it from a stranger
    talk        requests and their answers, over as many connections as it takes
    client      `RendezvousClient`
    store       `ControlStore`, through which groups are made
    thread      `ControlThread`, the daemon thread whose event loop carries a client, and threads for what blocks
"""
