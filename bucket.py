"""bucket.py: one small interface over a folder, a mounted volume or any S3 store; `serve` makes a folder an S3 store.

    python bucket.py serve DIR --listen HOST:PORT    # then http://HOST:PORT/NAME is the folder DIR/NAME
    python bucket.py ls|get|put|rm ADDRESS …         # look at, copy or remove objects
    python bucket.py check ADDRESS                   # which of the guarantees below hold there, as a table
    python bucket.py mirror ADDRESS DIR              # keep DIR/adapters equal to the bucket's, whole folders only

An ADDRESS is a path, file:///path, s3://bucket/prefix or http(s)://host:port/bucket/prefix (with the usual AWS_… variables
or ~/.aws/credentials). A bucket maps keys ("steps/000034.json") to bytes. Machines that share nothing else agree by one
operation, *create-if-absent* (`put_new`): of all who create a key one wins, and everybody reads the winner's bytes. Several
files become one object by a manifest, the last to appear (`publish`, `fetch`).

Guarantees (tested on a folder, our server, SeaweedFS, and through a proxy that fails one call in five):
 1. put_new: one winner of any race. A writer killed at any point leaves the old state or the new one, never a part.
 2. list: every key finished before the call, in byte order, no temporary file; `start_after` makes following a log cheap.
    (SeaweedFS alone puts a/x before a-b; this project has no such neighbours.)
 3. fetch: exactly the published bytes, or an error; a store that shows a manifest before its files is waited for.
 4. No key leaves the bucket's folder or prefix; a bad key is refused before any I/O.
 5. Retries are bounded and logged; a retried put_new whose first try had landed says True.

How. Folder: temp file, fsync, link(2) to the key (fails if it exists), fsync the folder. S3 [1]: `If-None-Match: *`; 412 =
lost, 409 = try again. `probe` finds stores that ignore this (rclone) or lack it (501 on B2; mounts without links):
`conditional` turns False, and one writer is still safe. Mounts that check links only on their own machine (hf-mount, s3fs)
pass the probe: use one learner there.

Does not: multipart uploads (an object is at most 5 GB), byte ranges, presigned URLs, ACLs, versions, delimiters. The
commands `serve`, `get` and `put` pass any size in bounded memory; `fetch` and `mirror` hold one adapter. `serve` bounds its
connections, but a hostile client can keep others waiting: not for the open internet.

[1] https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
[2] https://docs.aws.amazon.com/IAM/latest/UserGuide/create-signed-request.html
"""
import argparse, configparser, contextlib, email.utils, errno, hashlib, hmac, html, http.server, io, itertools
import json, logging, os, random, re, shutil, sys, tempfile, threading, time, uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit
from xml.sax.saxutils import escape

import requests

log = logging.getLogger("bucket")
MANIFEST, MANIFEST_FORMAT = "manifest.json", {"format": "async-grpo-manifest", "version": 1}
TEMP, TEMP_S = ".tmp-", 86_400.0      # names of unfinished writes begin so; after a day their writer is dead
CHUNK_BYTES, MAX_OBJECT_BYTES = 1 << 20, 5 << 30
LATE_FILE_S = 60.0                    # longest wait for a file that a manifest names; mounts say "not there" for 30 s
TRIES, PAUSE_S = 10, 0.1              # of an S3 call; pauses of 0.1, 0.2, … 15 s with jitter, at most 41 s in all
CONNECT_S, STALL_S, SLOWEST_BYTES_PER_S = 10.0, 60.0, 20_000    # a body may take STALL_S + size / SLOWEST_BYTES_PER_S
PASSING = {408, 409, 429, 500, 502, 503, 504}
SKEW_S = 900                          # requests dated further off are refused, as AWS does
MAX_CONNECTIONS, IDLE_S = 400, 30.0   # of `serve`; an idle one ends before a client that waits for its place gives up
# What file systems answer to a call they lack: link on FAT, rename on mountpoint-s3, fsync of a folder on FUSE.
NO_SUCH_CALL = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

# ---- Errors, keys, manifests -------------------------------------------------------------------------------
# One class per thing that a caller does differently; with what `serve` answers. A folder's own errors are OSErrors, too.

class BucketError(OSError): status, code = 500, "InternalError"                # a store failed, after all tries
class NotFound(BucketError): status, code = 404, "NoSuchKey"                   # the key is not there
class BadKey(BucketError, ValueError): status, code = 400, "InvalidArgument"   # refused before any I/O
class Conflict(BucketError): status, code = 400, "InvalidRequest"              # the name is taken
class Denied(BucketError): pass                                                # credentials: the user's to mend
class Corrupt(BucketError): pass                                               # wrong bytes: set the object aside

# Names between slashes: not empty, not "." or "..", not temporary; no backslash, control or non-XML character.
KEY = re.compile(r"(?:(?!\.{1,2}(?:/|\Z)|\.tmp-)[^/\\\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]+(?:/(?!\Z)|\Z))+")

def key_check(key: str) -> str:
    """The key, if every kind of store keeps it as it is and inside the bucket; else BadKey."""
    names = key.encode().split(b"/") if isinstance(key, str) and KEY.fullmatch(key) else [b""]
    if not 0 < max(map(len, names)) <= 255 or len(key.encode()) > 900:
        raise BadKey(f"bad key {key!r:.200}: want names of 1 to 255 bytes joined by '/', 900 in all, "
                     f"without '.', '..', '{TEMP}…', backslash and control characters")
    return key

def entry_of(file: BinaryIO) -> dict:
    """What a manifest says of a file, which is left at its end."""
    return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.seek(0, io.SEEK_END)}

class Bucket:
    """What a folder and an S3 store share, written on what each has (`data` is bytes or a binary file):
    put_new(key, data): create if absent. True: these bytes are the object, maybe by a try whose reply was lost.
    put(key, data): create or replace a mutable object. delete(key): idempotent.
    get(key), open(key): the object in memory, or as a binary file however large it is; NotFound.
    list(prefix, start_after): keys in byte order that begin so and come later."""
    address: str
    root: Path | None = None     # the folder of a file bucket
    conditional: bool = True     # False once the store was seen to lack create-if-absent: one learner only

    def probe(self) -> bool:
        """Is create-if-absent honoured? Creates a fresh key twice; the second must be refused."""
        key = f"probe/{uuid.uuid4().hex}"
        first, second = self.put_new(key, b"first"), self.put_new(key, b"second")
        self.conditional = self.conditional and first and not second and self.get(key) == b"first"
        self.delete(key)
        return self.conditional

    def publish(self, prefix: str, files: dict[str, bytes], meta: dict | None = None) -> bool:
        """All files, then manifest.json: their sizes and sha256, and `meta`. True: created. False: these bytes
        were there, with their first publisher's meta. Conflict: other bytes have the name."""
        assert MANIFEST not in files, f"publish itself writes {MANIFEST}, got {sorted(files)}"
        prefix, entries = prefix.rstrip("/"), {name: entry_of(io.BytesIO(data)) for name, data in files.items()}
        # Sorted, so that equal values are equal bytes; NaN and infinity are not JSON.
        manifest = json.dumps({**(meta or {}), **MANIFEST_FORMAT, "files": entries}, sort_keys=True, allow_nan=False) + "\n"
        # Files before manifest: who sees the manifest can have all that it names.
        is_ours = all(self.put_new(f"{prefix}/{name}", data) or self.get(f"{prefix}/{name}") == data
                      for name, data in sorted(files.items()))
        if is_ours and self.put_new(f"{prefix}/{MANIFEST}", manifest.encode()):
            return True
        if not is_ours or self.manifest(prefix)["files"] != entries:
            raise Conflict(f"{self.address}: {prefix} is taken by other files; publish under a new name")
        return False

    def manifest(self, prefix: str) -> dict:
        """The manifest, checked. Subtle: its names become paths of the reader, so they are checked like keys."""
        data, is_known = self.get(f"{prefix}/{MANIFEST}"), False
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            manifest = json.loads(data)
            is_known = MANIFEST_FORMAT.items() <= manifest.items() and all(
                key_check(name) != MANIFEST and entry.keys() == {"size", "sha256"}
                for name, entry in manifest["files"].items())
        if not is_known:
            raise Corrupt(f"{self.address}: {prefix}/{MANIFEST} is no {MANIFEST_FORMAT}: {data[:80]!r}; set it aside")
        return manifest

    def fetch(self, prefix: str, wait_s: float = LATE_FILE_S) -> tuple[dict, dict[str, bytes]]:
        """The manifest and its files, verified. NotFound: no manifest. Corrupt: wrong twice, or not all there for `wait_s`."""
        prefix, until = prefix.rstrip("/"), time.monotonic() + wait_s
        manifest = self.manifest(prefix)
        return manifest, {name: self._fetch_file(prefix, name, entry, until) for name, entry in manifest["files"].items()}

    def _fetch_file(self, prefix: str, name: str, entry: dict, until: float) -> bytes:
        damaged = 0
        for attempt in itertools.count():
            try:
                data = self.get(f"{prefix}/{name}")
            except NotFound:
                # Pruning takes the manifest first: if that is gone too, the file is not late, and this raises.
                data = self.get(f"{prefix}/{MANIFEST}")[:0]
            if (got := entry_of(io.BytesIO(data))) == entry:
                return data
            # The right size with wrong bytes is damage, not lateness; one more read rules out the network.
            damaged += got["size"] == entry["size"]
            if damaged == 2 or time.monotonic() > until:
                raise Corrupt(f"{self.address}: {prefix}/{name}: got {got}, its manifest says {entry}; set it aside")
            time.sleep(min(0.05 * 2 ** attempt, 2.0))

    def delete_prefix(self, prefix: str) -> None:
        """Manifests first, so that nobody finds one whose files are gone."""
        for key in sorted(self.list(prefix), key=lambda key: not key.endswith(f"/{MANIFEST}")):
            self.delete(key)

# ---- A folder or mounted volume ----------------------------------------------------------------------------

ABSENT = FileNotFoundError, IsADirectoryError, NotADirectoryError     # how a folder says that there is no such object

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

def open_temp(folder: Path) -> BinaryIO:
    """A new temporary file in a folder, which is made if needed, and again if `delete` takes it, empty, meanwhile."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            return open(folder / f"{TEMP}{uuid.uuid4().hex}", "xb")
        with contextlib.suppress(FileNotFoundError):
            for path in reversed([path for path in [folder, *folder.parents] if not path.is_dir()]):
                path.mkdir(exist_ok=True)
                sync_folder(path.parent)
    raise BucketError(f"{folder}: this folder cannot be made; check the path")

class FileBucket(Bucket):
    """A folder as a bucket. What a call wrote is durable when it returns (two fsyncs)."""
    def __init__(self, folder: str | Path):
        self.root = Path(os.path.abspath(os.path.expanduser(folder)))
        self.address = str(self.root)
        if self.root.is_file():
            raise BadKey(f"{self.root} is a file, want a folder")

    def put_new(self, key: str, data: bytes | BinaryIO) -> bool:
        return self._write(key, data, is_new=True)

    def put(self, key: str, data: bytes | BinaryIO) -> None:
        self._write(key, data, is_new=False)

    def _write(self, key: str, data: bytes | BinaryIO, is_new: bool) -> bool:
        """Bytes, then their name, by the first call that the file system has: no part ever has the name."""
        path = self.root / key_check(key)
        with open_temp(path.parent) as temp:
            try:
                shutil.copyfileobj(io.BytesIO(data) if isinstance(data, bytes) else data, temp, CHUNK_BYTES)
                temp.flush()
                os.fsync(temp.fileno())
                temp.close()
                for attempt, call in enumerate([os.link, os.replace, shutil.copyfile][not is_new:]):
                    # Without links: look, then rename (or copy: object mounts show closed files). Safe for one writer.
                    if is_new and attempt and path.exists():
                        return False
                    try:
                        call(temp.name, path)
                        return True
                    except FileExistsError:
                        # Subtle: over NFS the reply to our own link may be lost; its retry finds two names here.
                        return os.stat(temp.name).st_nlink > 1 and os.path.samefile(temp.name, path)
                    except OSError as error:
                        if error.errno not in NO_SUCH_CALL:
                            raise
                        log.log(30 if self.conditional else 10, "%s lacks %s: one learner only", self.root, call.__name__)
                        self.conditional = False
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temp.name)
                sync_folder(path.parent)

    def open(self, key: str) -> BinaryIO:
        try:
            return open(self.root / key_check(key), "rb")
        except ABSENT:
            raise NotFound(f"{self.address} has no {key}") from None

    def get(self, key: str) -> bytes:
        with self.open(key) as file:
            return file.read()

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[str]:
        """Reads only folders that can hold such keys. A name before `start_after` costs half a microsecond."""
        key_check(prefix + "x")
        folder, names = prefix[:prefix.rfind("/") + 1], []
        begin, after = prefix[len(folder):], start_after[len(folder):] if start_after.startswith(folder) else ""
        with contextlib.suppress(*ABSENT), os.scandir(self.root / folder) as entries:
            # A folder sorts by its name and slash, as its keys do. Python's order, by code points, is UTF-8's.
            names = sorted(folder + entry.name + "/" * entry.is_dir() for entry in entries
                           if ((name := entry.name) > after or after.startswith(name)) and name.startswith(begin))
        for name in names:
            if KEY.fullmatch(name.rstrip("/")):
                if not name.endswith("/") and name > start_after:
                    yield name
                elif name.endswith("/") and (name > start_after or start_after.startswith(name)):
                    yield from self.list(name, start_after)

    def delete(self, key: str) -> None:
        path = self.root / key_check(key)
        with contextlib.suppress(*ABSENT):
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

    def probe(self) -> bool:
        """As Bucket.probe; and removes what killed writers left more than a day ago. O(n) in files."""
        holds = super().probe()
        with open_temp(self.root) as mark:     # the clock that wrote the others' times, which may not be this machine's
            now = os.fstat(mark.fileno()).st_mtime
        os.unlink(mark.name)
        for path in self.root.rglob(f"{TEMP}*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < now - TEMP_S:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        return holds

# ---- An S3 store -------------------------------------------------------------------------------------------

def stamp_at(unix_s: float) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(unix_s))

def authorization(key_id: str, secret: str, region: str, request: tuple[str, str, dict], signed: dict[str, str]) -> str:
    """The header of AWS Signature Version 4 [2]. A request is method, encoded path, query; `signed` has lower-case names."""
    (method, path, query), names, date = request, ";".join(sorted(signed)), signed["x-amz-date"]
    pairs = sorted(f"{quote(name, '')}={quote(value, '')}" for name, value in query.items())
    headers = [f"{name}:{' '.join(signed[name].split())}" for name in sorted(signed)]
    text = "\n".join([method, path, "&".join(pairs), *headers, "", names, signed["x-amz-content-sha256"]])
    scope, key = [date[:8], region, "s3", "aws4_request"], f"AWS4{secret}".encode()
    to_sign = ["AWS4-HMAC-SHA256", date, "/".join(scope), hashlib.sha256(text.encode()).hexdigest()]
    for part in [*scope, "\n".join(to_sign)]:
        key = hmac.digest(key, part.encode(), "sha256")
    return f"AWS4-HMAC-SHA256 Credential={'/'.join([key_id, *scope])}, SignedHeaders={names}, Signature={key.hex()}"

def credentials() -> list[str]:
    """Key id, secret, session token: of the environment, else of AWS_PROFILE in ~/.aws/credentials, else ""."""
    names = ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"]
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return [os.environ.get(name.upper(), "") for name in names]
    profile, file = os.environ.get("AWS_PROFILE", "default"), configparser.ConfigParser(interpolation=None)
    path = os.path.expanduser(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    try:
        file.read(path, "utf-8")
        return [file.get(profile, name, fallback="") for name in names if profile == "default" or file[profile]]
    except (configparser.Error, UnicodeError, KeyError) as error:
        raise BadKey(f"{path}: {type(error).__name__} at profile {profile}; set AWS_PROFILE or AWS_ACCESS_KEY_ID") from None

def said(reply: requests.Response, tag: str) -> list[str]:
    """The texts of an XML element. S3's answers are flat, so a search will do."""
    return list(map(html.unescape, re.findall(f"<{tag}>(.*?)</{tag}>", reply.content.decode(errors="replace"), re.S)))

class S3Bucket(Bucket):
    """A prefix in a bucket of an S3 store, path style. Threads may share it."""
    def __init__(self, address: str, endpoint: str, path: str, region: str):
        url, (name, _, prefix) = urlsplit(endpoint), path.strip("/").partition("/")
        if not url.hostname or not name or "@" in url.netloc:
            raise BadKey(f"address {address!r} at {endpoint!r}: want s3://bucket/prefix or http(s)://host:port/bucket/prefix")
        self.address, self.scheme, self.region = address.rstrip("/"), url.scheme, region
        self.host = url.netloc.removesuffix(":443" if url.scheme == "https" else ":80")
        self.path = "/" + key_check(f"{unquote(url.path)}/{name}".lstrip("/"))
        self.prefix = key_check(prefix) + "/" if prefix else ""
        self.key_id, self.secret, self.token = credentials()
        self.skew_s, self.page_keys, self._session = 0.0, 1000, requests.Session()
        self._session.mount(f"{url.scheme}://", requests.adapters.HTTPAdapter(pool_maxsize=64))
        # Subtle: without an auth of its own, a session lets ~/.netrc replace our Authorization header.
        self._session.auth = lambda request: request

    def _send(self, method: str, key: str, query: dict, headers: dict, data: BinaryIO, entry: dict, into: BinaryIO):
        """One try, signed over all headers that S3 acts on and the body. A success goes to `into`: a Response."""
        path = quote(f"{self.path}/{self.prefix}{key}" if key else self.path)
        headers = {**headers, "host": self.host, "x-amz-date": stamp_at(time.time() + self.skew_s),
                   "x-amz-content-sha256": entry["sha256"]}
        if self.token:
            headers["x-amz-security-token"] = self.token
        if self.key_id:
            headers["authorization"] = authorization(self.key_id, self.secret, self.region, (method, path, query), headers)
        url = f"{self.scheme}://{self.host}{path}?{urlencode(query, quote_via=quote)}".rstrip("?")
        data.seek(0)
        # Subtle: bytes must leave within one time-out as a whole; of a file, each block of 16 KB has its own.
        with self._session.request(method, url, headers={**headers, "accept-encoding": "identity"}, stream=True,
                                   data=data if entry["size"] else None, allow_redirects=False,
                                   timeout=(CONNECT_S, STALL_S)) as reply:
            body, started = into if reply.status_code < 300 else io.BytesIO(), time.monotonic()
            body.seek(0)
            body.truncate()
            # read1 returns what has come, so that a body that trickles is noticed. A body that is cut raises.
            while chunk := reply.raw.read1(CHUNK_BYTES):
                body.write(chunk)
                if time.monotonic() - started > STALL_S + body.tell() / SLOWEST_BYTES_PER_S:
                    raise requests.Timeout(f"too slow: {body.tell()} bytes in {time.monotonic() - started:.0f} s")
            reply._content = body.getvalue() if isinstance(body, io.BytesIO) else b""
            return reply

    def _corrected(self, reply: requests.Response) -> bool:
        """Learn the store's region or clock from a refusal. True: something was learnt, so a new try makes sense."""
        region = (said(reply, "Region") or [reply.headers.get("x-amz-bucket-region", self.region)])[0]
        date = email.utils.parsedate_tz(reply.headers.get("date", ""))
        skew_s = email.utils.mktime_tz(date) - time.time() if date and reply.status_code == 403 else self.skew_s
        if region == self.region and abs(skew_s - self.skew_s) < SKEW_S / 3:
            return False
        log.warning("%s: now signing for region %s (was %s) and a clock %+.0f s from ours (was %+.0f)",
                    self.address, region, self.region, skew_s, self.skew_s)
        self.host = self.host.replace(f"s3.{self.region}.amazonaws", f"s3.{region}.amazonaws")
        self.region, self.skew_s = region, skew_s
        return True

    def _call(self, method: str, key: str = "", query: dict = {}, headers: dict = {}, data: bytes | BinaryIO = b"",
              accept: tuple = (), into: BinaryIO | None = None) -> requests.Response:
        """A success, or a status in `accept`. What may pass (transport, PASSING) is tried again."""
        what, maybe_landed = f"{method} {self.address}/{key}".rstrip("/"), False
        file = io.BytesIO(data) if isinstance(data, bytes) else data
        entry = entry_of(file)
        for attempt in range(1, TRIES + 1):
            try:
                reply = self._send(method, key, query, headers, file, entry, into or io.BytesIO())
            except (OSError, requests.packages.urllib3.exceptions.HTTPError) as error:
                while error.__context__:     # to the bottom of what urllib3 and requests wrapped
                    error = error.__context__
                why, maybe_landed = f"{type(error).__name__}: {error}", True
            else:
                if reply.status_code == 412 and maybe_landed:
                    theirs = io.BytesIO(self._call("GET", key, accept=(404,)).content)
                    # Refused by our own earlier try, whose reply was lost?
                    reply.status_code = 200 if entry_of(theirs) == entry else 412
                status = reply.status_code
                if status < 300 or status in accept:
                    return reply
                code = (said(reply, "Code") or [""])[0]
                if status == 404 and code != "NoSuchBucket":
                    raise NotFound(f"{self.address} has no {key}")
                why = " ".join([str(status), code, *said(reply, "Message")]).strip()
                if not (self._corrected(reply) or status in PASSING or code == "RequestTimeout"):
                    break
                maybe_landed |= status >= 500
            if attempt < TRIES:
                pause_s = min(PAUSE_S * 2 ** (attempt - 1), 15.0) * random.uniform(0.5, 1)
                log.warning("%s: %s; try %d of %d in %.1f s", what, why, attempt + 1, TRIES, pause_s)
                time.sleep(pause_s)
        if why[:3] in ("401", "403"):
            hint = "check the AWS_… keys and their rights" if self.key_id else "set AWS_ACCESS_KEY_ID or AWS_PROFILE"
            raise Denied(f"{what}: {why} (try {attempt}); {hint}")
        raise BucketError(f"{what}: {why} (try {attempt}); check endpoint {self.host}, bucket and region {self.region}")

    def put_new(self, key: str, data: bytes | BinaryIO) -> bool:
        if self.conditional:
            reply = self._call("PUT", key_check(key), {}, {"if-none-match": "*"}, data, accept=(412, 501))
            if reply.status_code != 501:
                return reply.ok
            log.warning("%s lacks If-None-Match: one learner only", self.address)
            self.conditional = False
        is_free = not self._call("HEAD", key_check(key), accept=(404,)).ok
        if is_free:
            self.put(key, data)
        return is_free

    def put(self, key: str, data: bytes | BinaryIO) -> None:
        self._call("PUT", key_check(key), data=data)

    def get(self, key: str) -> bytes:
        return self._call("GET", key_check(key)).content

    def open(self, key: str) -> BinaryIO:
        file = tempfile.TemporaryFile()
        self._call("GET", key_check(key), into=file)
        file.seek(0)
        return file

    def delete(self, key: str) -> None:
        self._call("DELETE", key_check(key), accept=(404,))

    def list(self, prefix: str = "", start_after: str = "") -> Iterator[str]:
        """A call for each 1,000. Objects that are no keys of ours (folder markers) are left out."""
        query = {"list-type": "2", "max-keys": str(self.page_keys), "prefix": self.prefix + key_check(prefix + "x")[:-1]}
        if start_after:
            query["start-after"] = self.prefix + start_after
        while True:
            page = self._call("GET", query=query)
            if not page.content.rstrip().endswith(b"</ListBucketResult>"):
                raise BucketError(f"GET {self.address}: got {page.content[:80]!r}, no S3 listing; check the address")
            yield from filter(KEY.fullmatch, (key.removeprefix(self.prefix) for key in said(page, "Key")))
            if not (tokens := said(page, "NextContinuationToken")):
                return
            query["continuation-token"] = tokens[0]

def open_bucket(address: str | os.PathLike) -> FileBucket | S3Bucket:
    """The bucket at a path, file:///path, s3://bucket/prefix or http(s)://host:port/bucket/prefix. AWS_ENDPOINT_URL_S3
    or AWS_ENDPOINT_URL says where s3:// is, and may carry a path."""
    address, env = os.fspath(address), os.environ.get
    scheme, is_url, rest = address.partition("://")
    if not address or is_url and (scheme not in ("file", "s3", "http", "https") or re.search("[?#\n]", address)):
        raise BadKey(f"address {address!r}: want a path, file:///path, s3://bucket/prefix or http(s)://host:port/…")
    if not is_url or scheme == "file":
        return FileBucket(unquote(urlsplit(address).path) if is_url else address)
    region = env("AWS_REGION") or env("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = env("AWS_ENDPOINT_URL_S3") or env("AWS_ENDPOINT_URL") or f"https://s3.{region}.amazonaws.com"
    if scheme != "s3":
        host, _, rest = unquote(rest).partition("/")
        endpoint = f"{scheme}://{host}"
    return S3Bucket(address, endpoint.rstrip("/"), rest, region)

# ---- A folder served as an S3 store ------------------------------------------------------------------------

AUTHORIZATION = re.compile(r"AWS4-HMAC-SHA256 Credential=[!-~]+/\d{8}/([\w-]+)/s3/aws4_request, ?"
                           r"SignedHeaders=([a-z0-9;-]+), ?Signature=\w+")
LISTING = {"list-type", "prefix", "start-after", "continuation-token", "max-keys", "encoding-type", "fetch-owner"}
UNHEEDED = {"range", "if-match", "x-amz-copy-source", "transfer-encoding"}     # headers that would do harm if ignored

class Refused(BucketError):
    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status, self.code = status, code

class Handler(http.server.BaseHTTPRequestHandler):
    """What S3Bucket and boto3 ask of S3, over `server.bucket`, a FileBucket whose first-level folders are the S3
    buckets. As a file (`read`) it is the body of its request, which so goes to disk in bounded memory."""
    protocol_version, timeout, disable_nagle_algorithm = "HTTP/1.1", IDLE_S, True

    def log_message(self, format: str, *args) -> None:
        log.debug(format, *args)

    def answer(self) -> None:
        length = self.headers.get("content-length", "" if self.command == "PUT" else "0")
        self.unread = int(length) if re.fullmatch("[0-9]{1,10}", length) else MAX_OBJECT_BYTES + 1
        self.close_connection |= self.unread > MAX_OBJECT_BYTES or "transfer-encoding" in self.headers
        self.digest = hashlib.sha256()
        try:
            try:
                status, body = 200, self._result()
            except OSError as error:
                status, code = getattr(error, "status", 500), getattr(error, "code", "InternalError")
                log.log(40 if status == 500 else 20, "%s %s: %s", self.command, self.path, error)
                body = f"<Error><Code>{code}</Code><Message>{escape(str(error))}</Message></Error>".encode()
            # An unread body would be taken for the next request, and closing on it would lose our reply.
            with contextlib.suppress(Refused):
                while self.read(CHUNK_BYTES):
                    pass
            with io.BytesIO(body) if isinstance(body, bytes) else body as file:
                self.send_response(status)
                self.send_header("Content-Length", str(file.seek(0, io.SEEK_END)))
                if file is body:
                    stat = os.fstat(file.fileno())
                    self.send_header("Last-Modified", self.date_time_string(stat.st_mtime))
                    self.send_header("ETag", f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"')
                self.end_headers()
                file.seek(0)
                if self.command != "HEAD":
                    shutil.copyfileobj(file, self.wfile, CHUNK_BYTES)
        except OSError as error:
            log.info("%s %s: the client is gone: %s", self.command, self.path, error)
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = answer

    def read(self, size: int) -> bytes:
        """The next piece of the body. Refused at an end that is not what was signed: no object gets its name then."""
        chunk = self.rfile.read(min(self.unread, size)) if self.unread <= MAX_OBJECT_BYTES else b""
        self.unread -= len(chunk)
        self.digest.update(chunk)
        want = self.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        if not chunk and (self.unread or want not in ("UNSIGNED-PAYLOAD", self.digest.hexdigest())):
            raise Refused(400, "XAmzContentSHA256Mismatch", f"{self.unread} bytes are missing, or sha256 is not {want}")
        return chunk

    def _verified(self) -> tuple[str, str, dict]:
        """Bucket, key and query of the request, if its signature holds. Nothing of it was acted on before."""
        path, _, query = self.path.partition("?")
        path, query = unquote(path), dict(parse_qsl(query, keep_blank_values=True))
        if self.server.secret:
            given = self.headers.get("authorization", "")
            match = AUTHORIZATION.fullmatch(given)
            signed = {name: self.headers.get(name, "") for name in match[2].split(";")} if match else {}
            must = {"host", "x-amz-date", "x-amz-content-sha256"}
            must |= {name for name in map(str.lower, self.headers) if name.startswith("x-amz-")}
            if must - signed.keys():
                raise Refused(403, "AccessDenied", "want an AWS4-HMAC-SHA256 Authorization over host and all x-amz-…")
            # Dates of one format order as text.
            date, now = signed["x-amz-date"], time.time()
            if not stamp_at(now - SKEW_S) < date < stamp_at(now + SKEW_S):
                raise Refused(403, "RequestTimeTooSkewed", f"x-amz-date {date}, here it is {stamp_at(now)}")
            want = authorization(self.server.key_id, self.server.secret, match[1], (self.command, quote(path), query), signed)
            if not hmac.compare_digest(want.replace(", ", ",").encode(), given.replace(", ", ",").encode()):
                raise Refused(403, "SignatureDoesNotMatch", "wrong key id or secret, or changed on the way")
        return *path[1:].partition("/")[::2], query

    def _result(self) -> bytes | BinaryIO:
        """Carry out the request: the body of a 200, or an OSError."""
        bucket, (name, key, query) = self.server.bucket, self._verified()
        where, folder = key_check(f"{name}/{key}" if key else name), bucket.root / key_check(name)
        is_listing = self.command == "GET" and not key
        condition = self.headers.get("if-none-match") if self.command == "PUT" else None
        unheeded = UNHEEDED & set(map(str.lower, self.headers)) or query.keys() - (LISTING if is_listing else {"x-id"})
        if unheeded or self.unread > MAX_OBJECT_BYTES or condition not in (None, "*" if bucket.conditional else None):
            raise Refused(501, "NotImplemented", f"{self.command} {self.path}: header, parameter or length not served")
        if is_listing and query.get("list-type") == "2":
            return self._listing(name, query)
        if key and self.command in ("GET", "HEAD"):
            return bucket.open(where)
        if key and self.command == "PUT":
            if (bucket.put_new if condition else bucket.put)(where, self) is False:
                raise Refused(412, "PreconditionFailed", f"{key} exists")
        elif key and self.command == "DELETE":
            bucket.delete(where)
        elif self.command == "PUT":
            folder.mkdir(parents=True, exist_ok=True)
        elif self.command != "HEAD":
            raise Refused(501, "NotImplemented", f"{self.command} {self.path} is not served")
        elif not folder.is_dir():
            raise Refused(404, "NoSuchBucket", f"no bucket {name}")
        return b""

    def _listing(self, name: str, query: dict) -> bytes:
        limit, after = query.get("max-keys", "1000"), query.get("continuation-token") or query.get("start-after")
        keys = self.server.bucket.list(f"{name}/{query.get('prefix', '')}", f"{name}/{after}" if after else "")
        page = list(itertools.islice(keys, max(1, min(int(limit) if limit.isdecimal() else 1000, 1000))))
        is_cut, items = next(keys, None) is not None, []
        for key in page:
            with contextlib.suppress(FileNotFoundError):
                stat, text = os.stat(self.server.bucket.root / key), escape(key[len(name) + 1:])
                date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(stat.st_mtime))
                items.append(f"<Contents><Key>{text}</Key><Size>{stat.st_size}</Size><LastModified>{date}</LastModified></Contents>")
        if is_cut:
            items.append(f"<NextContinuationToken>{escape(page[-1][len(name) + 1:])}</NextContinuationToken>")
        return (f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{"".join(items)}'
                f"<IsTruncated>{str(is_cut).lower()}</IsTruncated></ListBucketResult>").encode()

class Server(http.server.ThreadingHTTPServer):
    """A thread for each connection, MAX_CONNECTIONS at most: more wait in the kernel's queue until one ends."""
    request_queue_size, places = 128, threading.Semaphore(MAX_CONNECTIONS)

    def process_request(self, *connection) -> None:
        self.places.acquire()
        super().process_request(*connection)

    def close_request(self, request) -> None:
        super().close_request(request)
        self.places.release()

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):   # a client that was killed is no fault of ours
            super().handle_error(request, client_address)

def serve(folder: str, listen: str) -> None:
    """Serve a folder until interrupted. With AWS_ACCESS_KEY_ID and its secret set, only what they signed passes."""
    host, _, port = listen.rpartition(":")
    key_id, secret = os.environ.get("AWS_ACCESS_KEY_ID", ""), os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    is_local = host == "localhost" or re.fullmatch(r"127\.[0-9.]+", host)
    if not re.fullmatch(r".+:[0-9]{1,5}", listen) or int(port) > 65535 or bool(key_id) != bool(secret) \
            or not (secret or is_local):
        raise BadKey(f"--listen {listen}: want HOST:PORT; and AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, which only "
                     "an address like 127.0.0.1 may lack")
    with Server((host, int(port)), Handler) as server:
        server.bucket, server.key_id, server.secret = FileBucket(folder), key_id, secret
        server.bucket.probe()
        print(f"ready role=serve url=http://{host}:{server.server_port}", flush=True)
        server.serve_forever()

# ---- Commands ----------------------------------------------------------------------------------------------

def check(bucket: Bucket) -> Iterator[tuple[str, bool, str]]:
    """Each guarantee, whether it holds at this address, and the error if a call failed. Leaves nothing behind."""
    base, big, bucket.page_keys = f"check-{uuid.uuid4().hex}/", random.randbytes(CHUNK_BYTES), 3
    keys = [f"{base}odd/{name}" for name in ("a b", "a%2Fb", "a+b", "a-b", "a0", "a~", "b/a", "ü")]
    replaced = lambda data: bucket.put(base + "a", data) or bucket.get(base + "a") == data

    def raced() -> bool:
        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(lambda writer: bucket.put_new(base + "c", b"%d" % writer), range(16)))
        return sum(won) == 1 and bucket.get(base + "c") == b"%d" % won.index(True)

    claims = {
        "an object of 1 MiB reads back as written": lambda: replaced(big),
        "a mutable object is replaced": lambda: replaced(b"new"),
        "an empty object is kept": lambda: replaced(b""),
        "put_new creates once, and the first bytes stay": lambda: [
            bucket.put_new(base + "b", b"%d" % n) for n in (1, 2)] == [True, False] and bucket.get(base + "b") == b"1",
        "of 16 racing writers one wins, and its bytes stay": raced,
        "keys with space, percent, plus, tilde and umlaut are kept": lambda: all(
            [bucket.put_new(key, key.encode()) for key in keys] + [bucket.get(key) == key.encode() for key in keys]),
        "list has every key at once, in byte order, over pages": lambda: list(bucket.list(base + "odd/")) == keys,
        "list starts after a key": lambda: list(bucket.list(base + "odd/", keys[3])) == keys[4:],
        "publish creates once": lambda: [bucket.publish(base + "p", {"f": big}, {"try": n}) for n in (1, 2)] == [True, False],
        "fetch returns what was published": lambda: bucket.fetch(base + "p")[1] == {"f": big},
        "a deleted key is gone": lambda: bucket.delete(keys[0]) or not list(bucket.list(keys[0]))}
    try:
        for claim, holds in claims.items():
            try:
                yield claim, holds(), ""
            except OSError as error:
                yield claim, False, str(error)
    finally:
        bucket.delete_prefix(base)

def mirror(bucket: Bucket, local: FileBucket, known: set[str]) -> None:
    """One round: copy adapters that are new in the bucket, remove those that it pruned; whole folders, by rename."""
    if not known:
        local.probe()     # sweeps what a killed mirror left
    there, here = ({key.split("/")[1] for key in each.list("adapters/") if key.endswith(f"/{MANIFEST}")}
                   for each in (bucket, local))
    for name in sorted(there - known):
        prefix = f"adapters/{name}"
        try:
            if name not in here:
                manifest, files = bucket.fetch(prefix)
                local.publish(prefix, files, manifest)
                print(f"mirrored {name}", flush=True)
            elif local.manifest(prefix) != bucket.manifest(prefix):
                raise Conflict(f"{local.root}/{prefix} is of another run than {bucket.address}; take an empty folder")
        except (NotFound, Corrupt) as error:
            log.error("%s is not mirrored: %s", name, error)
        known.add(name)
    # An empty listing is more likely a wrong address than a pruned run.
    for name in sorted(here - there) if there else []:
        gone = local.root / "adapters" / f"{TEMP}{uuid.uuid4().hex}"
        shutil.rmtree((local.root / "adapters" / name).rename(gone))
        known.discard(name)
        print(f"removed {name}", flush=True)

def run(args: argparse.Namespace) -> int:
    """Carry out a command; its exit code."""
    if args.command == "serve":
        return serve(args.dir, args.listen)
    bucket, known = open_bucket(args.address), set()
    if args.command == "ls":
        for key in bucket.list(args.prefix or ""):
            print(key)
    elif args.command == "get":
        with bucket.open(args.key) as data, open(args.file or os.dup(1), "wb") as file:
            shutil.copyfileobj(data, file, CHUNK_BYTES)
    elif args.command == "put":
        with open(args.file, "rb") if args.file else tempfile.TemporaryFile() as data:
            if not args.file:     # a pipe cannot be read twice, as signing and retries ask for
                shutil.copyfileobj(sys.stdin.buffer, data, CHUNK_BYTES)
                data.seek(0)
            bucket.put(args.key, data)
    elif args.command == "rm":
        bucket.delete_prefix(args.key) if args.key.endswith("/") else bucket.delete(args.key)
    elif args.command == "check":
        print(f"check {bucket.address} python={sys.version.split()[0]} {sys.platform} requests={requests.__version__}")
        rows = [print(f"{'ok' if holds else 'NO':4}{claim}{': ' * bool(error)}{error}", flush=True) or holds
                for claim, holds, error in check(bucket)]
        return 0 if all(rows) else 1
    while args.command == "mirror":
        try:
            mirror(bucket, FileBucket(args.dir), known)
        except OSError as error:
            # An outage is outlived; a folder of another run is not.
            if args.once or isinstance(error, Conflict):
                raise
            log.error("%s; trying again", error)
        if args.once:
            break
        time.sleep(args.every_s)
    return 0

def seconds(text: str) -> float:
    """The type of a flag that is a time."""
    if not 0 <= (value := float(text)) < 1e9:   # NaN is not, either
        raise ValueError
    return value

class Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}; try --help\n")

def main(argv: list[str] | None = None) -> int:
    parser = Arguments(prog="bucket.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, names, text in [
            ("serve", "dir", "serve a folder as an S3 store"),
            ("ls", "address prefix?", "print the keys that begin with PREFIX"),
            ("get", "address key file?", "copy an object to a file or stdout"),
            ("put", "address key file?", "copy a file or stdin to an object"),
            ("rm", "address key", "delete an object or, if KEY ends with /, all below it"),
            ("check", "address", "test the guarantees there"),
            ("mirror", "address dir", "keep DIR/adapters equal to the bucket's, for a vLLM that reads a local path")]:
        subparser = commands.add_parser(command, help=text, description=text)
        for name in names.split():
            subparser.add_argument(name.rstrip("?"), nargs="?" * name.endswith("?") or None, metavar=name.rstrip("?").upper())
    commands.choices["serve"].add_argument("--listen", default="127.0.0.1:9000", metavar="HOST:PORT",
                                           help="default %(default)s; port 0: a free one")
    subparser.add_argument("--once", action="store_true", help="one round, then exit")
    subparser.add_argument("--every-s", type=seconds, default=1.0, help="seconds between rounds (default %(default)s)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        return run(args)
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        advice = f" ({args.listen}); --listen HOST:0 takes a free port" if error.errno == errno.EADDRINUSE else ""
        print(f"bucket.py: {error}{advice}", file=sys.stderr)
        return 2 if isinstance(error, (BadKey, Denied)) else 1

if __name__ == "__main__":
    sys.exit(main())
