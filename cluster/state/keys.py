"""Every Redis key that Tandem uses: its name, its lifetime, its owner. No other file has a key's text.

Keys of one life of a service carry its service id (random per start) and expire by themselves; what is desired state
and outlives a restart does not. Prefix `tandem:`. Changes of desired state are announced on the channel that has the
key's name (notifications.py).
"""

from typing import NamedTuple

COUNTER_FIELD = "@version"
"""The counter of a map that has it among its entries."""


class MapKeys(NamedTuple):
    """The place of a durable map (durable_map.py). entries: a hash of names to values; fields that begin with "@" are
    no names. id, counter: keys of its epoch. counter None: COUNTER_FIELD of `entries`. owns_id False: the id is another
    owner's, who writes it after a loss."""

    entries: str
    id: str
    counter: str | None = None
    owns_id: bool = True


def absorbed(entries: str) -> str:
    """Set of the ids of a durable map whose entries, lost before, were written back into the one that is there: who
    remembers one of them need not do it again. No TTL. Owner: the map."""
    return f"tandem:absorbed:{entries.removeprefix('tandem:')}"


SENTINEL = "tandem:initialized"
"""Id of the epoch of all of Redis, present once durable state was seeded; missing = Redis is unavailable. No TTL.
Owner: the process that seeds."""

GROUP_RECORD_TTL_MS = 3000
GATEWAY_RECORD_TTL_MS = 10_000
START_FAILURE_TTL_S = 600


def groups(service: str) -> str:
    """Set of group ids. TTL 1 h, renewed by every heartbeat. Owner: coordinators; readers drop dead ids."""
    return f"tandem:{service}:groups"


def group(service: str, group_id: str) -> str:
    """GroupRecord (msgpack) of one group. PX 3000, written each second. Owner: that group's coordinator."""
    return f"tandem:{service}:group:{group_id}"


GROUP_REPORT_TTL_MS = 30_000
REPORTS_ASKED_TTL_S = 3600
"""Longer than a report lives: a counter that begins again meets no report with a higher number."""


def group_report(service: str, group_id: str) -> str:
    """GroupReport (msgpack) of one group: statistics, adapters. PX 30 s, written when somebody has asked. Owner: that
    group's coordinator."""
    return f"tandem:{service}:group-report:{group_id}"


def reports_asked(service: str) -> str:
    """Counts questions for reports of the groups, from the wall clock's milliseconds on, announced. TTL 1 h, renewed by
    each. Owner: who asks."""
    return f"tandem:{service}:reports-asked"


PREFIX_RESETS_TTL_S = 3600


def prefix_resets(service: str) -> str:
    """Counts orders to forget prefix caches, from the wall clock's milliseconds on, announced. TTL 1 h, renewed by
    each. Owner: gateways."""
    return f"tandem:{service}:prefix-resets"


RECORDS_ASKED_TTL_S = 60
RECORD_ANSWER_TTL_MS = 10_000


def records_asked(service: str) -> str:
    """List of questions for records of requests (record_questions.py), announced. At most 64, TTL 60 s, renewed by
    each. Owner: the gateway that asks."""
    return f"tandem:{service}:records-asked"


def record_answer(service: str, question: str) -> str:
    """RequestRecord (msgpack), the answer to one question. PX 10 s. Owner: the gateway that had the request."""
    return f"tandem:{service}:record:{question}"


RECORDINGS_ASKED_TTL_S = 60
RECORDING_ANSWER_TTL_MS = 60_000


def recordings_asked(service: str) -> str:
    """List of orders to groups to write their recordings (recording_orders.py), announced. At most 64, TTL 60 s,
    renewed by each. Owner: the gateway that orders."""
    return f"tandem:{service}:recordings-asked"


def recording_answer(service: str, order: str) -> str:
    """The place of a recording, or why there is none (JSON): the answer to one order. PX 60 s. Owner: the group."""
    return f"tandem:{service}:recording:{order}"


DRAINS_TTL_S = 3600


def drains(service: str) -> str:
    """Hash of a group's id to the order to drain it (msgpack DrainOrder), announced. TTL 1 h, renewed by each order: a
    group that has ended never comes back under its id. Owner: gateways."""
    return f"tandem:{service}:drains"


def gateways(service: str) -> str:
    """Set of gateway ids. TTL 1 h, renewed by every heartbeat. Owner: gateways."""
    return f"tandem:{service}:gateways"


def gateway(service: str, gateway_id: str) -> str:
    """GatewayRecord (msgpack) of one gateway. PX 10 s, written every 2 s. Owner: that gateway."""
    return f"tandem:{service}:gateway:{gateway_id}"


def events(service: str) -> str:
    """List of what became of groups (msgpack GroupEvent), for the launcher to print, announced. At most 200, TTL 1 h.
    Owner: coordinators and gateways; the launcher takes them."""
    return f"tandem:{service}:events"


def group_tally(service: str) -> str:
    """Hash of counts of groups, and the last loss (group_events.py). TTL 30 days, renewed by each event that counts and
    each scrape of /metrics. Owner: as events()."""
    return f"tandem:{service}:group-tally"


def groups_counted(service: str) -> str:
    """Sorted set of the starts and ends of groups that the tally has, by time. At most 1000, TTL as group_tally().
    Owner: as events()."""
    return f"tandem:{service}:groups-counted"


EVENTS_TTL_S = 3600
TALLY_TTL_S = 30 * 24 * 3600

SCALING_TTL_MS = 10_000
LOAD_TTL_S = 30 * 24 * 3600


def scaling(service: str) -> str:
    """ScalingReport (msgpack): the number of groups that is wanted, and why. PX 10 s, renewed every 3 s. Owner: the
    gateways of a service whose groups are scaled by our policy; each writes the same."""
    return f"tandem:{service}:scaling"


def load_s(service: str) -> str:
    """Seconds that a group took to load last, as text: for gateways that start while there is none. TTL 30 days,
    renewed by each load and by each start of a gateway. Owner: coordinators."""
    return f"tandem:{service}:load-s"


def start_failure(service: str) -> str:
    """The reason why a process of this service could not start (msgpack StartFailure). TTL 10 min. Owner: the failing
    process."""
    return f"tandem:{service}:start-failure"


TENANTS = "tandem:tenants"
"""Hash of a tenant's name to its JSON (Tenant). No TTL: desired state. Owner: cluster/tenants/store.py."""
TENANTS_VERSION = "tandem:tenants:version"
"""Counter of the epoch of TENANTS. No TTL. Owner: the store."""
TENANTS_ORIGIN = "tandem:tenants:origin"
"""Id of the epoch of TENANTS, written with its first change, or when the first gateway with keys starts: a service with
one is closed for good. No TTL. Owner: the store."""
TENANTS_MAP = MapKeys(TENANTS, TENANTS_ORIGIN, TENANTS_VERSION)
QUOTA_TTL_S = 400 * 86400
USAGE_ORIGIN = "tandem:usage:origin"
"""Id of the epoch of the usage rows; another = they were lost, and journals are replayed. TTL --usage-days, renewed by
every batch of rows. Owner: cluster/tenants/ledger.py."""


def quota(tenant: str) -> str:
    """Hash of a tenant's buckets and of each gateway's part (cluster/tenants/quota.lua). TTL 400 days, because a
    budget is counted here; renewed by every call. Owner: gateways."""
    return f"tandem:quota:{{{tenant}}}"


def quota_gateways(tenant: str) -> str:
    """Sorted set of gateway id to the end of its lease (ms of the server's clock). TTL as quota(). Owner: gateways."""
    return f"tandem:quota:{{{tenant}}}:gateways"


def usage(tenant: str, day: str) -> str:
    """Hash of request id to its row (msgpack, cluster/tenants/billing_record.py), of a tenant and a UTC day (20260131).
    TTL --usage-days. Owner: gateways."""
    return f"tandem:usage:{day}:{tenant}"


def usage_written(gateway: str) -> str:
    """Counter of the epoch of the usage rows, as one gateway sees it: its batches. TTL --usage-days. Owner:
    cluster/tenants/ledger.py."""
    return f"tandem:usage:written:{gateway}"


def usage_sent(gateway: str) -> str:
    """Wall clock seconds: the rows of a gateway that ended until then were all sent, by itself or from its journals.
    TTL --usage-days, renewed by its batches. Owner: cluster/tenants/ledger.py."""
    return f"tandem:usage:sent:{gateway}"


def usage_sums(day: str) -> str:
    """Hash of the sums of rows of a UTC day that --usage-rows has no room for (cluster/tenants/billing_record.py). TTL
    --usage-days. Owner: the gateway that holds USAGE_LEASE."""
    return f"tandem:usage:sums:{day}"


USAGE_SUMMED = "tandem:usage:summed"
"""Wall clock seconds: rows that ended before are in sums, and none is written any more. TTL --usage-days. Owner: the
gateway that holds USAGE_LEASE."""
USAGE_LEASE = "tandem:usage:lease"
"""The gateway that sums up rows. PX 3 min, renewed each minute. Owner: that gateway."""
USAGE_LEASE_TTL_MS = 180_000


def usage_tenants(day: str) -> str:
    """Set of the tenants that have rows on a UTC day. TTL --usage-days. Owner: gateways."""
    return f"tandem:usage:{day}"


def adapters(model: str) -> str:
    """Hash of the adapters listed beside a base model: name to AdapterEntry (msgpack), and two fields that are no
    names, ADAPTERS_VERSION (the counter of its epoch) and ADAPTERS_BASE (BaseFacts, msgpack). No TTL: desired state.
    Owner: gateways and `tandem adapters`."""
    return f"tandem:adapters:{model}"


def adapters_map(model: str) -> MapKeys:
    """The map of adapters(model). Its epoch has the id of all of Redis, SENTINEL."""
    return MapKeys(adapters(model), SENTINEL, owns_id=False)


def sightings(service: str) -> str:
    """Set of the gateways that watch --lora-watch-dir. PX 10 s, renewed each second. Owner: gateways."""
    return f"tandem:{service}:sightings"


def sighting(service: str, gateway_id: str) -> str:
    """Names of the folders that one gateway sees in --lora-watch-dir (msgpack list). PX 10 s, written each second.
    Owner: that gateway."""
    return f"tandem:{service}:sighting:{gateway_id}"


SIGHTING_TTL_MS = 10_000
ADAPTERS_VERSION = COUNTER_FIELD
ADAPTERS_BASE = "@base"
ADAPTER_MODELS = "tandem:adapter-models"
"""Set of the base models that have a list of adapters. No TTL: desired state. Owner: gateways."""


def modules_listed(service: str) -> str:
    """Digest of the --lora-modules that were listed last: a gateway with the same ones that comes later must not list
    again what was unloaded since, one of a version with others lists them. TTL 30 days. Owner: gateways."""
    return f"tandem:{service}:modules-listed"


MODULES_LISTED_TTL_S = 30 * 24 * 3600


def charges(service: str) -> str:
    """Hash of what all groups have charged each tenant (tokens by weight, as text), and of '' to the random name of
    these totals; another name = they began again. PX 15 min, renewed by each group every second. Owner: coordinators
    (cluster/fleet/charges.py)."""
    return f"tandem:{service}:charges"


def charges_changed(service: str) -> str:
    """Sorted set of tenants by the time of their total's last change (us of the server's clock). PX as charges()."""
    return f"tandem:{service}:charges-changed"


def charges_number(service: str, group_id: str) -> str:
    """The number of a group's last addition to charges(). PX 15 min, renewed every second. Owner: that group's
    coordinator."""
    return f"tandem:{service}:charges-number:{group_id}"


CHARGES_TTL_MS = 15 * 60_000


def responses(tenant: str) -> str:
    """Sorted set of a tenant's stored responses by the end of their life (us of the server's clock). TTL
    --response-store-ttl, renewed by each. Owner: gateways (cluster/gateway/responses/response_store.py)."""
    return f"tandem:responses:{{{tenant}}}"


def response_sizes(tenant: str) -> str:
    """Hash of a tenant's stored responses to their bytes, those of their events included, and of RESPONSES_TOTAL to the
    sum. TTL as responses(). Owner: gateways."""
    return f"tandem:responses:{{{tenant}}}:sizes"


def response(tenant: str, response_id: str) -> str:
    """One stored response with the items of its conversation (StoredResponse, compressed msgpack). TTL
    --response-store-ttl. Owner: the gateway that answered."""
    return f"tandem:responses:{{{tenant}}}:value:{response_id}"


def response_state(tenant: str, response_id: str) -> str:
    """Hash of what becomes of a response that is made in the background, until it is stored whole: `state`, and
    `until`, the end of its gateway's lease (ms of the server's clock). TTL --response-store-ttl. Owner: the gateway
    that makes it."""
    return f"{response(tenant, response_id)}:state"


def response_events(tenant: str, response_id: str) -> str:
    """Stream of the events of a response of the background that is streamed, but for its last one: entry `N-0` has a
    batch of them, compressed, N events with those before. TTL as response(). Owner: the gateway that makes it."""
    return f"tandem:responses:{{{tenant}}}:value:{response_id}:events"


RESPONSES_TOTAL = "@total"


def files(tenant: str) -> str:
    """Sorted set of a tenant's files by the end of their life (ms of the server's clock), those that are still written
    too. TTL: the longest of their lives. Owner: gateways (cluster/gateway/files/file_store.py)."""
    return f"tandem:files:{{{tenant}}}"


def file_sizes(tenant: str) -> str:
    """Hash of a tenant's files to their bytes, not compressed, and of FILES_TOTAL to the sum. TTL as files(). Owner:
    gateways."""
    return f"tandem:files:{{{tenant}}}:sizes"


def file_record(tenant: str, file_id: str) -> str:
    """FileRecord (msgpack) of a file that is whole. TTL: its life, --files-ttl at most, or until the window of a batch
    that reads it is over, and an hour. Owner: the gateway that took it, or that ran its batch."""
    return f"tandem:files:{{{tenant}}}:record:{file_id}"


def file_data(tenant: str, file_id: str) -> str:
    """Hash of the pieces of a file, by number from 0, compressed. TTL as file_record(). Owner: as its."""
    return f"tandem:files:{{{tenant}}}:data:{file_id}"


FILES_TOTAL = "@total"


def batches(tenant: str) -> str:
    """Sorted set of a tenant's batches by the end of their life (ms of the server's clock). TTL as batch(). Owner:
    gateways (cluster/gateway/batches/batch_store.py)."""
    return f"tandem:batches:{{{tenant}}}"


def batch(tenant: str, batch_id: str) -> str:
    """Hash of a batch: BatchFacts (msgpack), its status, the times of its statuses, counts of lines. TTL --files-ttl,
    and its completion window as long as it is not over. Owner: the gateway that has its lease."""
    return f"tandem:batches:{{{tenant}}}:batch:{batch_id}"


def batch_rows(tenant: str, batch_id: str) -> str:
    """Hash of the output rows of a batch that is not over, by the number of their line, compressed. TTL as batch().
    Owner: the gateway that has its lease."""
    return f"tandem:batches:{{{tenant}}}:rows:{batch_id}"


def batch_lease(tenant: str, batch_id: str) -> str:
    """The gateway that runs a batch. PX 10 s, renewed every 2 s. Owner: that gateway."""
    return f"tandem:batches:{{{tenant}}}:lease:{batch_id}"


def idempotency(tenant: str, digest: str) -> str:
    """Hash of a request with an Idempotency-Key, by SHA-256 of the key: digest of the request, its nonce, who answers
    it and until when that is certain, then its answer, compressed. TTL --idempotency-ttl, renewed while it is answered.
    Owner: gateways (cluster/gateway/idempotency/key_store.py)."""
    return f"tandem:idempotency:{{{tenant}}}:{digest}"


def idempotency_keys(tenant: str) -> str:
    """Sorted set of a tenant's keys, by SHA-256, by the end of their life (ms of the server's clock). TTL as
    idempotency(). Owner: gateways."""
    return f"tandem:idempotency:{{{tenant}}}"


def idempotency_sizes(tenant: str) -> str:
    """Hash of a tenant's keys to the bytes of their answers, compressed, and of "@total" to the sum. TTL as
    idempotency(). Owner: gateways."""
    return f"tandem:idempotency:{{{tenant}}}:sizes"


def live_batches(model: str) -> str:
    """Sorted set of the batches of a base model that are not over, TENANT/ID by the time of their creation (s). TTL:
    the longest of their lives. Owner: gateways."""
    return f"tandem:live-batches:{model}"
