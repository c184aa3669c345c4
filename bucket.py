"""bucket.py: one small interface over a folder, a mounted volume or any S3 store; and a server that makes a folder an S3 store.

    python bucket.py serve DIR --listen HOST:PORT    # then http://HOST:PORT/NAME is the folder DIR/NAME
    python bucket.py ls|get|put|rm ADDRESS …         # look at, copy or remove objects
    python bucket.py check ADDRESS                   # which of the guarantees below hold there, as a table
    python bucket.py mirror ADDRESS DIR              # keep DIR/adapters equal to the bucket's adapters, whole folders only

An ADDRESS is a path, file:///path, s3://bucket/prefix or http(s)://host:port/bucket/prefix (for S3 as usual AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY or ~/.aws/credentials, and AWS_ENDPOINT_URL_S3). A bucket maps keys ("steps/000034.json") to bytes. Machines that
share nothing else agree through one operation, *create-if-absent* (`put_new`): of all who create a key one wins, and everybody reads
the winner's bytes. Several files become one object by a manifest, the last to appear (`publish`, `fetch`).

Guarantees (tested on a folder, our server and SeaweedFS):
 1. put_new: one winner of any race. A writer killed at any point leaves the old state or the new one, never part of an object.
 2. list: every key finished before the call, in byte order, no temporary file; `start_after` makes following a log cheap.
    (SeaweedFS alone puts a/x before a-b; this project has no such neighbours.)
 3. fetch: exactly the published bytes, or an error; a store that shows a manifest before its files is waited for.
 4. No key leaves the bucket's folder or prefix; a bad key is refused before any I/O.
 5. Retries are bounded and logged; a retried put_new whose first try had landed says True.

How. Folder: temp file, fsync, link(2) to the key (fails if it exists), fsync the folder. S3 [1]: `If-None-Match: *`; 412 = lost, 409 =
try again. `probe` finds stores that ignore this (rclone) or lack it (501 on B2; mounts without links): `conditional` turns False, and
one writer is still safe. Mounts that check links only on their own machine (hf-mount, s3fs) pass the probe: use one learner there.

Does not: multipart uploads (an object is at most 5 GB; clients hold it in memory, `serve` does not), presigned URLs, ACLs, versions,
delimiters, byte ranges, sweeping of temp files that killed writers left (readers ignore them).

[1] https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
[2] https://docs.aws.amazon.com/IAM/latest/UserGuide/create-signed-request.html
"""
import argparse, collections, configparser, contextlib, email.utils, errno, hashlib, hmac, html, http.server, io, itertools, json, logging
import os, random, re, shutil, sys, threading, time, uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import requests

log = logging.getLogger("bucket")
MANIFEST, MANIFEST_FORMAT = "manifest.json", {"format": "async-grpo-manifest", "version": 1}
TEMP = ".tmp-"                        # names of unfinished writes begin so: no key may, and no reader sees them
CHUNK_BYTES, MAX_OBJECT_BYTES = 1 << 20, 5 << 30
LATE_FILE_S = 60.0                    # longest wait for a file that a manifest names; mounts remember "not there" for 30 s
TRIES, PAUSE_S = 10, 0.1              # of an S3 call; pauses of 0.1, 0.2, … 15 s with jitter, at most 41 s in all
CONNECT_S, STALL_S, SLOWEST_BYTES_PER_S = 10.0, 60.0, 20_000     # a body may take STALL_S + size / SLOWEST_BYTES_PER_S
SKEW_S = 900                          # requests dated further off are refused, as AWS does
# What file systems answer to a call they lack: link on FAT, rename on mountpoint-s3, fsync of a folder on FUSE.
NO_SUCH_CALL = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

# ---- Errors, keys, manifests ---------------------------------------------------------------------------------------------------------
# One class per thing that a caller does differently; with what `serve` answers: HTTP status and S3 code.

class BucketError(Exception): status, code = 500, "InternalError"                # the world failed: what, got, expected, what to do
class NotFound(BucketError): status, code = 404, "NoSuchKey"                     # the key is not there
class BadKey(BucketError, ValueError): status, code = 400, "InvalidArgument"     # the caller's mistake, refused before any I/O
class Conflict(BucketError): status, code = 400, "InvalidRequest"                # the name is taken by other bytes
class Corrupt(BucketError): status, code = 500, "InternalError"                  # size, sha256 or manifest is wrong: set it aside
class Unsupported(BucketError): status, code = 400, "InvalidRequest"             # this store cannot do it

# Names between slashes: not empty, not "." or "..", not temporary; no backslash, control or non-XML character.
KEY = re.compile(r"(?:(?!\.{1,2}(?:/|\Z)|\.tmp-)[^/\\\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]+(?:/(?!\Z)|\Z))+")

def key_check(key: str) -> str:
    """The key, if every kind of store keeps it as it is and inside the bucket; else BadKey."""
    if not isinstance(key, str) or not KEY.fullmatch(key) or len(key.encode()) > 900 or max(map(len, key.encode().split(b"/"))) > 255:
        raise BadKey(f"bad key {key!r:.200}: want names of 1 to 255 bytes joined by '/', 900 in all; no '.', '..', '\\', '{TEMP}…', controls")
    return key

def to_json(value) -> bytes:
    """Sorted and newline-ended: equal values are equal bytes. ValueError for NaN and Inf, which are not JSON."""
    return (json.dumps(value, sort_keys=True, allow_nan=False) + "\n").encode()

def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

def entry_of(data: bytes) -> dict:
    return {"size": len(data), "sha256": sha256(data)}

def read_manifest(data: bytes, where: str) -> dict:
    """The manifest, checked. Subtle: its names become paths of the reader, so they are checked like keys."""
    try:
        manifest = json.loads(data)
        known = all(manifest[field] == value for field, value in MANIFEST_FORMAT.items()) and all(
            key_check(name) != MANIFEST and entry.keys() == {"size", "sha256"} for name, entry in manifest["files"].items())
    except (ValueError, LookupError, TypeError, AttributeError):
        known = False
    if not known:
        raise Corrupt(f"{where}: got {data[:80]!r}, expected a manifest with {MANIFEST_FORMAT}; set it aside")
    return manifest

class Bucket:
    """What both kinds share, written on what each has:
    put_new(key, data): create if absent. True: these bytes are the object, maybe by a try whose reply was lost. False: others are.
    put(key, data): create or replace a mutable object. get(key): its bytes, or NotFound. delete(key): idempotent.
    list(prefix, start_after): keys in byte order that begin so and come later."""
    address: str
    root: Path | None = None     # the folder of a file bucket
    conditional: bool = True     # False once the store was seen to lack create-if-absent: one learner only

    def probe(self) -> bool:
        """Is create-if-absent honoured? Creates a fresh key twice; the second must be refused. False: one learner only."""
        key = f"probe/{uuid.uuid4().hex}"
        first, second = self.put_new(key, b"first"), self.put_new(key, b"second")
        self.conditional = self.conditional and first and not second and self.get(key) == b"first"
        self.delete(key)
        return self.conditional

    def publish(self, prefix: str, files: dict[str, bytes], meta: dict | None = None) -> bool:
        """All files, then manifest.json: their sizes and sha256, and `meta`. True: created. False: these bytes were there, with
        their first publisher's meta. Conflict: other bytes have the name."""
        assert MANIFEST not in files, f"publish itself writes {MANIFEST}, got {sorted(files)}"
        prefix, entries = prefix.rstrip("/"), {name: entry_of(data) for name, data in files.items()}
        # Files before manifest: who sees the manifest can have all that it names.
        for name, data in sorted(files.items()):
            if not self.put_new(f"{prefix}/{name}", data) and self.get(f"{prefix}/{name}") != data:
                raise Conflict(f"{self.address}: {prefix}/{name} is taken by other bytes; publish under a new name")
        if self.put_new(f"{prefix}/{MANIFEST}", to_json({**(meta or {}), **MANIFEST_FORMAT, "files": entries})):
            return True
        theirs = read_manifest(self.get(f"{prefix}/{MANIFEST}"), f"{self.address}: {prefix}/{MANIFEST}")["files"]
        if theirs != entries:
            raise Conflict(f"{self.address}: {prefix} is taken by files {sorted(theirs)}; publish under a new name")
        return False

    def fetch(self, prefix: str, wait_s: float = LATE_FILE_S) -> tuple[dict, dict[str, bytes]]:
        """The manifest and the files it names, verified. NotFound: no manifest. Corrupt: wrong bytes twice, or incomplete for `wait_s`."""
        prefix, until = prefix.rstrip("/"), time.monotonic() + wait_s
        manifest = read_manifest(self.get(f"{prefix}/{MANIFEST}"), f"{self.address}: {prefix}/{MANIFEST}")
        return manifest, {name: self._fetch_file(prefix, name, entry, until) for name, entry in sorted(manifest["files"].items())}

    def _fetch_file(self, prefix: str, name: str, entry: dict, until: float) -> bytes:
        damaged = 0
        for attempt in itertools.count():
            try:
                data = self.get(f"{prefix}/{name}")
            except NotFound:
                # Pruning takes the manifest first: if that is gone too, the file is not late, and this raises NotFound.
                data = self.get(f"{prefix}/{MANIFEST}")[:0]
            if entry_of(data) == entry:
                return data
            # The right size with wrong bytes is damage, not lateness; one more read rules out the network.
            damaged += len(data) == entry["size"]
            if damaged == 2 or time.monotonic() > until:
                raise Corrupt(f"{self.address}: {prefix}/{name}: got {entry_of(data)}, its manifest says {entry}; set it aside")
            time.sleep(min(0.05 * 2 ** attempt, 2.0))

    def delete_prefix(self, prefix: str) -> None:
        """Manifests first, so that nobody finds one whose files are gone."""
        for key in sorted(self.list(prefix), key=lambda key: not key.endswith(f"/{MANIFEST}")):
            self.delete(key)

# ---- A folder or mounted volume ------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def telling(action: str):
    """OSError -> BucketError that says what was tried."""
    try:
        yield
    except (NotADirectoryError, IsADirectoryError, FileExistsError):
        raise Unsupported(f"{action}: a folder cannot hold both an object and objects below it; use another key") from None
    except OSError as error:
        raise BucketError(f"{action}: {error.strerror or error}; check the disk, the mount and its permissions") from error

def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where its file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SUCH_CALL:
            raise
    finally:
        os.close(handle)

def open_temp(folder: Path) -> io.BufferedWriter:
    """A new temporary file in a folder, which is made if needed, and again if `delete` takes it, empty, meanwhile."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return open(folder / f"{TEMP}{uuid.uuid4().hex}", "xb")
        with contextlib.suppress(FileNotFoundError):
            for path in reversed([path for path in [folder, *folder.parents] if not path.is_dir()]):
                path.mkdir(exist_ok=True)
                sync_folder(path.parent)

class FileBucket(Bucket):
    """A folder as a bucket. What a call wrote is durable when it returns (two fsyncs)."""
    def __init__(self, folder: str | Path):
        self.root = Path(os.path.abspath(os.path.expanduser(folder)))
        self.address = str(self.root)

    def put_new(self, key: str, data: bytes | Iterable[bytes]) -> bool:
        return self._write(key, data, True, os.link, os.replace, shutil.copyfile)

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        self._write(key, data, False, os.replace, shutil.copyfile)

    def _write(self, key: str, data: bytes | Iterable[bytes], new: bool, *calls) -> bool:
        """Bytes, then their name, by the first of `calls` that the file system has: a killed writer leaves no part of an object."""
        path = self.root / key_check(key)
        with telling(f"writing {path}"), open_temp(path.parent) as temp:
            try:
                temp.writelines([data] if isinstance(data, bytes) else data)
                temp.flush()
                os.fsync(temp.fileno())
                temp.close()
                for call in calls:
                    # Without links: look, then rename (or copy: object mounts show a file once it is closed). Right for one writer.
                    if new and call is not calls[0] and path.exists():
                        return False
                    try:
                        call(temp.name, path)
                        return True
                    except FileExistsError:
                        # Subtle: over NFS the reply to our own link may be lost and its retry land here; then temp has two names.
                        return os.stat(temp.name).st_nlink == 2
                    except OSError as error:
                        if error.errno not in NO_SUCH_CALL or call is calls[-1]:
                            raise
                        log.log(30 if self.conditional else 10, "%s lacks %s: one learner only", self.address, call.__name__)
                        self.conditional = False
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temp.name)
                sync_folder(path.parent)

    def open(self, key: str) -> io.BufferedReader:
        with telling(f"reading {key} in {self.address}"):
            try:
                return open(self.root / key_check(key), "rb")
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                raise NotFound(f"{self.address} has no {key}") from None

    def get(self, key: str) -> bytes:
        with self.open(key) as file, telling(f"reading {key} in {self.address}"):
            return file.read()

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[str]:
        """Reads only folders that can hold such keys; O(n log n) in the names of a folder."""
        key_check(prefix + "x")
        folder, names = prefix[:prefix.rfind("/") + 1], []
        with telling(f"listing {self.root / folder}"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            with os.scandir(self.root / folder) as entries:
                # A folder sorts by its name and slash, as its keys do. Code point order, Python's, is also UTF-8's byte order.
                names = sorted(folder + entry.name + "/" * entry.is_dir() for entry in entries)
        for name in names:
            if name.startswith(prefix) and KEY.fullmatch(name.rstrip("/")):
                if not name.endswith("/") and name > start_after:
                    yield name
                elif name.endswith("/") and (name > start_after or start_after.startswith(name)):
                    yield from self.list(name, start_after)

    def delete(self, key: str) -> None:
        path = self.root / key_check(key)
        with telling(f"deleting {path}"), contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            os.unlink(path)
        with contextlib.suppress(OSError):
            # Emptied folders go too: they are no objects.
            while (path := path.parent) != self.root:
                os.rmdir(path)

    def publish(self, prefix: str, files: dict[str, bytes], meta: dict | None = None) -> bool:
        """As Bucket.publish, but a finished folder is renamed into place: readers see all of it or nothing."""
        final = self.root / key_check(prefix.rstrip("/"))
        temp = FileBucket(final.with_name(f"{TEMP}{uuid.uuid4().hex}"))
        temp.conditional = self.conditional
        with telling(f"publishing {final}"):
            try:
                Bucket.publish(temp, "whole", files, meta)
                os.rename(temp.root / "whole", final)
                sync_folder(final.parent)
                return True
            except OSError as error:
                # A taken name (ENOTEMPTY, EEXIST, ENOTDIR) and a mount without rename are left to the general way.
                if error.errno not in NO_SUCH_CALL | {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                    raise
            finally:
                shutil.rmtree(temp.root, ignore_errors=True)
        return super().publish(prefix, files, meta)

# ---- An S3 store ---------------------------------------------------------------------------------------------------------------------

def stamp_at(unix_s: float) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(unix_s))

def signature(secret: str, region: str, method: str, path: str, query: Iterable[tuple[str, str]], signed: dict[str, str]) -> str:
    """AWS Signature Version 4 [2] over the encoded path, the query and the headers `signed` (names in lower case)."""
    names, pairs = sorted(signed), sorted((quote(name, ""), quote(value, "")) for name, value in query)
    request = [method, path, "&".join(map("=".join, pairs)), *(f"{name}:{' '.join(signed[name].split())}" for name in names), "",
               ";".join(names), signed["x-amz-content-sha256"]]
    scope = [signed["x-amz-date"][:8], region, "s3", "aws4_request"]
    to_sign = "\n".join(["AWS4-HMAC-SHA256", signed["x-amz-date"], "/".join(scope), sha256("\n".join(request).encode())])
    key = f"AWS4{secret}".encode()
    for part in [*scope, to_sign]:
        key = hmac.digest(key, part.encode(), "sha256")
    return key.hex()

def credentials() -> list[str]:
    """Key id, secret, session token: of the environment, else of AWS_PROFILE in ~/.aws/credentials; "" where there is none."""
    names = ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"]
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return [os.environ.get(name.upper(), "") for name in names]
    profile, file = os.environ.get("AWS_PROFILE", "default"), configparser.ConfigParser(interpolation=None)
    path = os.path.expanduser(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    try:
        file.read(path, "utf-8")
        return [file.get(profile, name, fallback="") for name in names if profile == "default" or file[profile]]
    except (configparser.Error, UnicodeError, KeyError) as error:
        raise BadKey(f"{path} has no readable profile {profile} ({type(error).__name__}); set AWS_PROFILE or AWS_ACCESS_KEY_ID") from None

def said(reply: requests.Response, tag: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", reply.content.decode(errors="replace"), re.S)
    return html.unescape(found[1]) if found else ""

class Connection(threading.local):
    """A kept-alive session for each thread."""
    def __init__(self):
        self.session = requests.Session()
        # Subtle: without an auth of its own, a session lets ~/.netrc replace our Authorization header.
        self.session.auth = lambda request: request
        self.session.verify = os.environ.get("AWS_CA_BUNDLE") or True

class S3Bucket(Bucket):
    """A prefix in a bucket of an S3 store, path style. Threads may share it."""
    def __init__(self, address: str, endpoint: str, name: str, prefix: str, region: str):
        url = urlsplit(endpoint)
        if not url.hostname or not name or "@" in url.netloc:
            raise BadKey(f"address {address!r} at endpoint {endpoint!r}: want s3://bucket/prefix or http(s)://host:port/bucket/prefix")
        self.address, self.scheme, self.region = address.rstrip("/"), url.scheme, region
        self.host = url.netloc.removesuffix(":443" if url.scheme == "https" else ":80")
        self.path, self.prefix = "/" + key_check(f"{unquote(url.path)}/{name}".lstrip("/")), key_check(prefix) + "/" if prefix else ""
        self.key_id, self.secret, self.token = credentials()
        self.skew_s, self.page_keys, self._connection = 0.0, 1000, Connection()

    def _send(self, method: str, key: str, query: dict, headers: dict, data: bytes) -> requests.Response:
        """One try, signed over all headers that S3 acts on and the sha256 of the body."""
        path = quote(f"{self.path}/{self.prefix}{key}" if key else self.path)
        signed = {**headers, "host": self.host, "x-amz-date": stamp_at(time.time() + self.skew_s), "x-amz-content-sha256": sha256(data)}
        if self.token:
            signed["x-amz-security-token"] = self.token
        headers = {**signed, "accept-encoding": "identity"}
        if self.key_id:
            code = signature(self.secret, self.region, method, path, query.items(), signed)
            scope = f"{self.key_id}/{signed['x-amz-date'][:8]}/{self.region}/s3/aws4_request"
            headers["authorization"] = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders={';'.join(sorted(signed))}, Signature={code}"
        url = f"{self.scheme}://{self.host}{path}?{urlencode(query, quote_via=quote)}".rstrip("?")
        # Subtle: bytes must leave within one time-out as a whole; of a file object, each block of 16 KB has its own.
        with self._connection.session.request(method, url, headers=headers, data=io.BytesIO(data) if data else None, stream=True,
                                              allow_redirects=False, timeout=(CONNECT_S, STALL_S)) as reply:
            body, started = bytearray(), time.monotonic()
            # read1 returns what has come, so that a body that trickles is noticed. A body that is cut raises.
            while chunk := reply.raw.read1(CHUNK_BYTES):
                body += chunk
                if time.monotonic() - started > STALL_S + len(body) / SLOWEST_BYTES_PER_S:
                    raise requests.Timeout(f"body too slow: {len(body)} bytes in {time.monotonic() - started:.0f} s")
            reply._content = bytes(body)
            return reply

    def _corrected(self, reply: requests.Response) -> bool:
        """Learn the store's region or clock from a refusal. True: something was learnt, so a new try makes sense."""
        region = reply.headers.get("x-amz-bucket-region") or said(reply, "Region") or self.region
        date = email.utils.parsedate_tz(reply.headers.get("date", ""))
        skew_s = email.utils.mktime_tz(date) - time.time() if date and reply.status_code == 403 else self.skew_s
        if region == self.region and abs(skew_s - self.skew_s) < SKEW_S / 3:
            return False
        log.warning("%s: region %s (we signed for %s), clock %+.0f s from ours (we signed for %+.0f); signing so from now on",
                    self.address, region, self.region, skew_s, self.skew_s)
        self.host = self.host.replace(f"s3.{self.region}.amazonaws", f"s3.{region}.amazonaws")
        self.region, self.skew_s = region, skew_s
        return True

    def _call(self, method: str, key: str = "", query: dict = {}, headers: dict = {}, data: bytes = b"", accept: tuple = ()) -> requests.Response:
        """A success, or a status in `accept`. What may pass (transport, 408, 409, 429, 5xx but 501) is tried TRIES times."""
        what, maybe_landed = f"{method} {self.address}" + f"/{key}" * bool(key), False
        for attempt in range(1, TRIES + 1):
            try:
                reply = self._send(method, key, query, headers, data)
                status = reply.status_code
                if status == 412 and maybe_landed and self.get(key) == data:
                    status = reply.status_code = 200      # refused by our own earlier try, whose reply was lost
                if status < 300 or status in accept:
                    return reply
                code = said(reply, "Code")
                why = " ".join(f"{status} {code} {said(reply, 'Message')}".split())
                if status == 404 and code != "NoSuchBucket":
                    raise NotFound(f"{self.address} has no {key}")
                if not self._corrected(reply) and status not in (408, 409, 429, 500, 502, 503, 504) and code != "RequestTimeout":
                    break
                maybe_landed |= status >= 500
            except (requests.RequestException, requests.packages.urllib3.exceptions.HTTPError, OSError) as error:
                while error.__context__:     # to the bottom of what urllib3 and requests wrapped
                    error = error.__context__
                why, maybe_landed = f"{type(error).__name__}: {error}", True
            if attempt < TRIES:
                pause_s = min(PAUSE_S * 2 ** (attempt - 1), 15.0) * random.uniform(0.5, 1)
                log.warning("%s: %s; try %d of %d in %.1f s", what, why, attempt + 1, TRIES, pause_s)
                time.sleep(pause_s)
        hint = f"check endpoint {self.host}, bucket and region {self.region}"
        if why[:3] in ("401", "403"):
            hint = "check the AWS_… keys and their rights" if self.key_id else "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        raise BucketError(f"{what}: {why} (try {attempt}); {hint}")

    def put_new(self, key: str, data: bytes) -> bool:
        if self.conditional:
            status = self._call("PUT", key_check(key), headers={"if-none-match": "*"}, data=data, accept=(412, 501)).status_code
            if status != 501:
                return status != 412
            log.warning("%s lacks If-None-Match: one learner only", self.address)
            self.conditional = False
        if self._call("HEAD", key_check(key), accept=(404,)).ok:
            return False
        self.put(key, data)
        return True

    def put(self, key: str, data: bytes) -> None:
        self._call("PUT", key_check(key), data=data)

    def get(self, key: str) -> bytes:
        return self._call("GET", key_check(key)).content

    def delete(self, key: str) -> None:
        self._call("DELETE", key_check(key), accept=(404,))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[str]:
        """A call for each 1,000. Objects that are no keys of ours (folder markers) are left out."""
        query = {"list-type": "2", "max-keys": str(self.page_keys), "prefix": self.prefix + key_check(prefix + "x")[:-1]}
        if start_after:
            query["start-after"] = self.prefix + start_after
        while query:
            try:
                page = ElementTree.fromstring(self._call("GET", query=query).content)
            except ElementTree.ParseError as error:
                raise BucketError(f"GET {self.address} answered with no S3 listing: {error}; check the address") from None
            yield from filter(KEY.fullmatch, [(node.text or "").removeprefix(self.prefix) for node in page.iterfind("{*}Contents/{*}Key")])
            token = page.findtext("{*}NextContinuationToken")
            query = {**query, "continuation-token": token} if token else {}

def open_bucket(address: str | os.PathLike) -> FileBucket | S3Bucket:
    """The bucket at a path, file:///path, s3://bucket/prefix or http(s)://host:port/bucket/prefix. AWS_ENDPOINT_URL_S3 or
    AWS_ENDPOINT_URL says where s3:// is; it may carry a path, and so may an http address that begins with it."""
    address, env = os.fspath(address), os.environ.get
    scheme, is_url, rest = address.partition("://")
    endpoint = (env("AWS_ENDPOINT_URL_S3") or env("AWS_ENDPOINT_URL") or "").rstrip("/")
    region = env("AWS_REGION") or env("AWS_DEFAULT_REGION") or "us-east-1"
    if not address or is_url and (scheme not in ("file", "s3", "http", "https") or re.search("[?#\n]", address)):
        raise BadKey(f"address {address!r}: want a path, file:///path, s3://bucket/prefix or http(s)://host:port/bucket/prefix")
    if not is_url or scheme == "file":
        return FileBucket(unquote(urlsplit(address).path) if is_url else address)
    if scheme == "s3":
        endpoint = endpoint or f"https://s3.{region}.amazonaws.com"
    else:
        endpoint = endpoint if endpoint and address.startswith(f"{endpoint}/") else f"{scheme}://{urlsplit(address).netloc}"
        rest = unquote(address[len(endpoint):])
    name, _, prefix = rest.strip("/").partition("/")
    return S3Bucket(address, endpoint, name, prefix, region)

# ---- A folder served as an S3 store --------------------------------------------------------------------------------------------------

AUTHORIZATION = re.compile(r"AWS4-HMAC-SHA256 Credential=([!-~]+)/\d{8}/([\w-]+)/s3/aws4_request, ?SignedHeaders=([a-z0-9;-]+), ?Signature=(\w+)")
LISTING = {"list-type", "prefix", "start-after", "continuation-token", "max-keys", "encoding-type", "fetch-owner"}
UNHEEDED = {"range", "if-match", "x-amz-copy-source", "transfer-encoding"}     # headers that would do harm if ignored

class Refused(BucketError):
    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status, self.code = status, code

class Handler(http.server.BaseHTTPRequestHandler):
    """What S3Bucket and boto3 ask of S3, over `server.bucket`, a FileBucket whose first-level folders are the S3 buckets."""
    protocol_version, timeout, disable_nagle_algorithm = "HTTP/1.1", STALL_S, True

    def log_message(self, format: str, *args) -> None:
        log.debug(format, *args)

    def answer(self) -> None:
        length, status = self.headers.get("content-length", "0" if self.command != "PUT" else ""), 200
        self.unread = int(length) if re.fullmatch("[0-9]{1,10}", length) else MAX_OBJECT_BYTES + 1
        self.close_connection |= self.unread > MAX_OBJECT_BYTES or "transfer-encoding" in self.headers
        try:
            try:
                body = self._result()
            except BucketError as error:
                log.log(logging.ERROR if error.status == 500 else logging.INFO, "%s %s: %s", self.command, self.path, error)
                body = io.BytesIO(f"<Error><Code>{error.code}</Code><Message>{escape(str(error))}</Message></Error>".encode())
                status = error.status
            # An unread body would be taken for the next request, and closing on it would lose our reply.
            with contextlib.suppress(Refused):
                collections.deque(self._body(), maxlen=0)
            with body:
                self.send_response(status)
                self.send_header("Content-Length", str(body.seek(0, io.SEEK_END)))
                if isinstance(body, io.BufferedReader):
                    stat = os.fstat(body.fileno())
                    self.send_header("Last-Modified", self.date_time_string(stat.st_mtime))
                    self.send_header("ETag", f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"')
                self.end_headers()
                body.seek(0)
                if self.command != "HEAD":
                    shutil.copyfileobj(body, self.wfile, CHUNK_BYTES)
        except OSError as error:
            log.info("%s %s: the client is gone: %s", self.command, self.path, error)
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = answer

    def _body(self) -> Iterator[bytes]:
        """What is unread of the body, in bounded memory; Refused if it was not what was signed, so that no object gets its name."""
        want, digest = self.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD"), hashlib.sha256()
        while 0 < self.unread <= MAX_OBJECT_BYTES and (chunk := self.rfile.read(min(self.unread, CHUNK_BYTES))):
            self.unread -= len(chunk)
            digest.update(chunk)
            yield chunk
        if self.unread or want not in ("UNSIGNED-PAYLOAD", digest.hexdigest()):
            raise Refused(400, "XAmzContentSHA256Mismatch", f"{self.unread} bytes are missing, or sha256 {digest.hexdigest()} is not {want}")

    def _verified(self) -> tuple[str, str, dict]:
        """Bucket, key and query of the request, if its signature holds. Nothing of it was acted on before."""
        path, _, query = self.path.partition("?")
        path, query = unquote(path), parse_qsl(query, keep_blank_values=True)
        if self.server.secret:
            match = AUTHORIZATION.fullmatch(self.headers.get("authorization", ""))
            signed = {name: self.headers.get(name, "") for name in match[3].split(";")} if match else {}
            must = {"host", "x-amz-date", "x-amz-content-sha256"} | {name for name in map(str.lower, self.headers) if name.startswith("x-amz-")}
            if must - signed.keys():
                raise Refused(403, "AccessDenied", f"want an AWS4-HMAC-SHA256 Authorization header that signs {sorted(must)}")
            # Dates of one format order as text.
            if not stamp_at(time.time() - SKEW_S) < signed["x-amz-date"] < stamp_at(time.time() + SKEW_S):
                raise Refused(403, "RequestTimeTooSkewed", f"x-amz-date {signed['x-amz-date']}, here it is {stamp_at(time.time())}")
            code = signature(self.server.secret, match[2], self.command, quote(path), query, signed)
            if not hmac.compare_digest(f"{match[1]} {match[4]}".encode(), f"{self.server.key_id} {code}".encode()):
                raise Refused(403, "SignatureDoesNotMatch", "wrong key id or secret, or the request was changed on its way")
        return *path[1:].partition("/")[::2], dict(query)

    def _result(self) -> io.BytesIO | io.BufferedReader:
        """Carry out the request: the body of a 200, or BucketError."""
        bucket, (name, key, query) = self.server.bucket, self._verified()
        where, folder = key_check(f"{name}/{key}" if key else name), bucket.root / key_check(name)
        listing, condition = self.command == "GET" and not key, self.headers.get("if-none-match") if self.command == "PUT" else None
        unheeded = UNHEEDED & set(map(str.lower, self.headers)) or query.keys() - (LISTING if listing else {"x-id"})
        if unheeded or condition not in (None, "*") or self.unread > MAX_OBJECT_BYTES:
            raise Refused(501, "NotImplemented", f"{self.command} {self.path} uses a header, parameter or length that is not served")
        if listing and query.get("list-type") == "2":
            return self._listing(name, query)
        if key and self.command in ("GET", "HEAD"):
            return bucket.open(where)
        if key and self.command == "PUT":
            if (bucket.put_new if condition else bucket.put)(where, self._body()) is False:
                raise Refused(412, "PreconditionFailed", f"{key} exists")
        elif key and self.command == "DELETE":
            bucket.delete(where)
        elif self.command == "PUT":
            folder.mkdir(parents=True, exist_ok=True)
        elif self.command != "HEAD":
            raise Refused(501, "NotImplemented", f"{self.command} {self.path} is not served")
        elif not folder.is_dir():
            raise Refused(404, "NoSuchBucket", f"no bucket {name}")
        return io.BytesIO()

    def _listing(self, name: str, query: dict) -> io.BytesIO:
        root, encode, limit = self.server.bucket.root, quote if "encoding-type" in query else escape, query.get("max-keys", "1000")
        after = query.get("continuation-token") or query.get("start-after")
        keys = self.server.bucket.list(f"{name}/{query.get('prefix', '')}", f"{name}/{after}" if after else "")
        page = list(itertools.islice(keys, max(1, min(int(limit) if limit.isdecimal() else 1000, 1000))))
        more = [f"<NextContinuationToken>{escape(page[-1][len(name) + 1:])}</NextContinuationToken>"] if next(keys, None) else []
        items = [f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>", *more, "<EncodingType>url</EncodingType>" * (encode is quote)]
        for key in page:
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(root / key)
                date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stat.st_mtime))
                items.append(f"<Contents><Key>{encode(key[len(name) + 1:])}</Key><Size>{stat.st_size}</Size><LastModified>{date}</LastModified></Contents>")
        return io.BytesIO(f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{"".join(items)}</ListBucketResult>'.encode())

class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128

def serve(folder: str, listen: str) -> int:
    """Serve a folder until interrupted. With AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY set, only what they signed passes."""
    host, _, port = listen.rpartition(":")
    key_id, secret = os.environ.get("AWS_ACCESS_KEY_ID", ""), os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535 or bool(key_id) != bool(secret):
        raise BadKey(f"--listen {listen}: want HOST:PORT, and both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or neither")
    if not secret and host != "localhost" and not re.fullmatch(r"127\.[0-9.]+", host):
        raise BadKey(f"--listen {listen} is open to others: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to what clients shall use")
    with Server((host, int(port)), Handler) as server:
        server.bucket, server.key_id, server.secret = FileBucket(folder), key_id, secret
        print(f"ready role=serve url=http://{host}:{server.server_port}", flush=True)
        server.serve_forever()

# ---- Commands ------------------------------------------------------------------------------------------------------------------------

def check(bucket: Bucket) -> Iterator[tuple[str, bool]]:
    """Each guarantee, and whether it holds at this address. Leaves nothing behind."""
    base, big, bucket.page_keys = f"check-{uuid.uuid4().hex}/", random.randbytes(CHUNK_BYTES), 3
    try:
        bucket.put(base + "a", big)
        yield "an object of 1 MiB reads back as written", bucket.get(base + "a") == big
        bucket.put(base + "a", b"")
        yield "a mutable object is replaced, here by an empty one", bucket.get(base + "a") == b""
        yield "put_new creates", bucket.put_new(base + "b", b"1")
        yield "put_new refuses a taken key and leaves its bytes", not bucket.put_new(base + "b", b"2") and bucket.get(base + "b") == b"1"
        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(lambda writer: bucket.put_new(base + "c", b"%d" % writer), range(16)))
        yield "of 16 racing writers one wins, and its bytes stay", sum(won) == 1 and bucket.get(base + "c") == b"%d" % won.index(True)
        keys = [f"{base}odd/{name}" for name in ("a b", "a%2Fb", "a+b", "a-b", "a0", "a~", "b/a", "ü")]
        made = all([bucket.put_new(key, key.encode()) for key in keys])
        yield "keys with space, percent, plus, tilde and umlaut are kept", made and all(bucket.get(key) == key.encode() for key in keys)
        yield "list has every key at once, in byte order, over pages", list(bucket.list(base + "odd/")) == keys
        yield "list starts after a key", list(bucket.list(base + "odd/", keys[3])) == keys[4:]
        yield "publish creates once", [bucket.publish(base + "p", {"f": big}), bucket.publish(base + "p/", {"f": big})] == [True, False]
        yield "fetch returns what was published", bucket.fetch(base + "p")[1] == {"f": big}
        bucket.delete(keys[0])
        bucket.delete(keys[0])
        yield "a deleted key is gone, and may be deleted again", list(bucket.list(keys[0])) == []
    finally:
        bucket.delete_prefix(base)

def mirror(bucket: Bucket, local: FileBucket, known: set[str]) -> None:
    """One round: copy adapters that are new in the bucket, remove those that it pruned; local folders come and go whole, by rename."""
    there, here = ({key.split("/")[1] for key in each.list("adapters/") if key.endswith(f"/{MANIFEST}")} for each in (bucket, local))
    for name in sorted(there - known):
        manifest_key = f"adapters/{name}/{MANIFEST}"
        try:
            if name not in here:
                manifest, files = bucket.fetch(f"adapters/{name}")
                local.publish(f"adapters/{name}", files, manifest)
                print(f"mirrored {name}", flush=True)
            elif local.get(manifest_key) != bucket.get(manifest_key):
                raise Conflict(f"{local.address}/adapters/{name} is of another run than {bucket.address}; mirror to an empty folder")
        except (NotFound, Corrupt) as error:
            log.error("%s is not mirrored: %s", name, error)
        known.add(name)
    # An empty listing is more likely a wrong address than a pruned run.
    for name in sorted(here - there) if there else []:
        shutil.rmtree((local.root / "adapters" / name).rename(local.root / "adapters" / f"{TEMP}{uuid.uuid4().hex}"))
        print(f"removed {name}", flush=True)

class Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}; try --help\n")

def run(args: argparse.Namespace) -> int:
    """Carry out a command; its exit code."""
    if args.command == "serve":
        return serve(args.dir, args.listen)
    bucket, file = open_bucket(args.address), getattr(args, "file", None)
    if args.command == "ls":
        for key in bucket.list(args.prefix or ""):
            print(key)
    elif args.command == "get":
        data = bucket.get(args.key)
        Path(file).write_bytes(data) if file else sys.stdout.buffer.write(data)
    elif args.command == "put":
        bucket.put(args.key, Path(file).read_bytes() if file else sys.stdin.buffer.read())
    elif args.command == "rm":
        bucket.delete_prefix(args.key) if args.key.endswith("/") else bucket.delete(args.key)
    elif args.command == "check":
        results = [print(f"{'ok' if holds else 'NO':4}{claim}", flush=True) or holds for claim, holds in check(bucket)]
        return 0 if all(results) else 1
    elif args.command == "mirror":
        local, known = FileBucket(args.dir), set()
        while True:
            try:
                mirror(bucket, local, known)
            except BucketError as error:
                # An outage is outlived; a folder of another run is not.
                if args.once or isinstance(error, Conflict):
                    raise
                log.error("%s; trying again", error)
            if args.once:
                break
            time.sleep(args.every_s)
    return 0

def main(argv: list[str] | None = None) -> int:
    parser = Arguments(prog="bucket.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, names, text in [
            ("serve", "dir", "serve a folder as an S3 store"), ("ls", "address prefix?", "print the keys that begin with PREFIX"),
            ("get", "address key file?", "copy an object to a file or stdout"), ("put", "address key file?", "copy a file or stdin to an object"),
            ("rm", "address key", "delete an object or, if KEY ends with /, all below it"), ("check", "address", "test the guarantees there"),
            ("mirror", "address dir", "keep DIR/adapters equal to the bucket's adapters, for a vLLM that reads a local path")]:
        commands.add_parser(command, help=text, description=text)
        for name in names.split():
            commands.choices[command].add_argument(name.rstrip("?"), nargs="?" if name.endswith("?") else None, metavar=name.rstrip("?").upper())
    commands.choices["serve"].add_argument("--listen", default="127.0.0.1:9000", metavar="HOST:PORT", help="default %(default)s; port 0: a free one")
    commands.choices["mirror"].add_argument("--once", action="store_true", help="one round, then exit")
    commands.choices["mirror"].add_argument("--every-s", type=float, default=1.0, help="seconds between rounds (default %(default)s)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        return run(args)
    except KeyboardInterrupt:
        return 0
    except (BucketError, OSError) as error:
        print(f"bucket.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadKey) else 1

if __name__ == "__main__":
    sys.exit(main())
