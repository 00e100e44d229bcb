"""Inside the sandbox: build it, give up all rights, and run a program once for each test.

Started by `sandbox` as a script, with the standard library alone. It reads one job (JSON) from stdin and writes one
line of JSON for each test to stdout. With `isolate`, it moves into namespaces of its own: of processes (it is number
1 and nothing outside exists), of mounts (a root of a few read-only folders and a scratch folder in memory), of the
network (none) and of IPC; as root directly, else through a user namespace. It then drops to an unprivileged user id
under root, in any case, because limits on processes do not bind root.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from typing import Any

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_EMPTY_PATH, _AT_RECURSIVE, _AT_FDCWD = 0x1000, 0x8000, -100
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_SYS_MOUNT_SETATTR = 442  # the same on all architectures
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SOLUTION, DRIVER = "solution.py", "driver.py"

_libc = ctypes.CDLL(None, use_errno=True)

# Calls the function of a solution; what the solution prints on the way goes nowhere.
_DRIVER_CODE = """
import json, os, runpy, sys
result = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
folder, name = sys.argv[1:]
arguments = json.load(sys.stdin)
names = runpy.run_path(os.path.join(folder, "solution.py"))
function = names.get(name) or getattr(names["Solution"](), name)
value = function(*arguments)
with os.fdopen(result, "w") as file:
    json.dump(value, file, default=list)
"""


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    encoded = [text.encode() for text in (source, target, kind)]
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def _set_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    given = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)  # struct mount_attr: set, clear, propagation, user namespace
    flags = _AT_RECURSIVE if recursive else 0
    arguments = _AT_FDCWD, path.encode(), flags, ctypes.byref(given), ctypes.c_size_t(ctypes.sizeof(given))
    _check(_libc.syscall(_SYS_MOUNT_SETATTR, *arguments), f"mount_setattr {path}")


def _enter_namespaces() -> None:
    flags = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        _check(_libc.unshare(flags), "unshare")
        return
    _check(_libc.unshare(flags | _CLONE_NEWUSER), "unshare")
    for name, content in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)


def _build_root(job: dict[str, Any]) -> None:
    """Make a file system in memory the root, mounted on the folder `job["scratch"]` and then moved, and leave the old one."""
    root = job["scratch"]
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    # Opened before the new root covers anything that lies below it.
    sources = {path: os.open(path, os.O_PATH) for path in job["folders"] if not os.path.islink(path)}
    links = {path: os.readlink(path) for path in job["folders"] if os.path.islink(path)}
    devices = {path: os.open(path, os.O_PATH) for path in _DEVICES}
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=16m,mode=755")
    # Before the rest, some of which may lie below /tmp: an interpreter in a clone there.
    os.mkdir(root + "/tmp")
    _mount("tmpfs", root + "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={job['scratch_mib']}m,mode=1777")
    for path, descriptor in (sources | devices).items():
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(target, exist_ok=True)
        else:
            open(target, "w").close()
        _mount(f"/proc/self/fd/{descriptor}", target, "", _MS_BIND | _MS_REC)
        nodev = _MOUNT_ATTR_NODEV if path in sources else 0
        _set_attributes(target, _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | nodev, recursive=True)
        os.close(descriptor)
    for path, link in links.items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(link, root + path)
    for folder in ("/proc", "/program"):
        os.makedirs(root + folder, exist_ok=True)
    with contextlib.suppress(OSError):  # a container may hide parts of /proc, and then not allow a new one
        _mount("proc", root + "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    _write_program(root + "/program", job)
    _set_attributes(root, _MOUNT_ATTR_RDONLY, recursive=False)
    os.chdir(root)
    here = ctypes.c_char_p(b".")
    _check(_libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], here, here), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/tmp")


def _write_program(folder: str, job: dict[str, Any]) -> None:
    for name, content in ((SOLUTION, job["program"]), (DRIVER, _DRIVER_CODE)):
        with open(os.path.join(folder, name), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(content)


def _give_up_rights(uid: int) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user has cleared it
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 0)  # the programs cannot trace this process
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # and cannot leave it, either


def _limit(job: dict[str, Any]) -> None:
    """Limits of a program, set between fork and exec."""
    os.setsid()
    memory, seconds = job["memory_mib"] << 20, math.ceil(job["timeout_seconds"]) + 1
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: job["scratch_mib"] << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_NPROC: job["num_processes"] + 1,  # this process counts
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _run_test(job: dict[str, Any], folder: str, given: str) -> dict[str, str]:
    command = [job["python"], "-I", "-B"]
    command += [f"{folder}/{DRIVER}", folder, job["function"]] if job["function"] else [f"{folder}/{SOLUTION}"]
    stdin = os.memfd_create("stdin")
    os.write(stdin, given.encode(errors="surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    program = subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: _limit(job),
        env={"PATH": "/usr/bin:/bin", "HOME": os.getcwd(), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
    )
    os.close(stdin)
    assert program.stdout is not None
    try:
        status, output = _read(program.stdout.fileno(), job["timeout_seconds"], job["output_kib"] << 10)
        if status == "ok":  # it has closed its output; it may still not end
            try:
                status = "ok" if program.wait(timeout=job["timeout_seconds"]) == 0 else "error"
            except subprocess.TimeoutExpired:
                status = "timeout"
    finally:
        _kill_all(isolated=job["isolate"])
        program.stdout.close()
    return {"status": status, "output": output.decode(errors="replace")}


def _read(descriptor: int, seconds: float, limit: int) -> tuple[str, bytes]:
    """Everything that comes until the other end is closed, within limits of time and size."""
    deadline = time.monotonic() + seconds
    output = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left)[0]:
            break
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return "ok", output
        output += chunk
        if len(output) > limit:
            return "output", output[:limit]
    return "timeout", output


def _empty_scratch(kept: set[str]) -> None:
    """Remove what a program has left in its folder: each test starts afresh."""
    for name in set(os.listdir()) - kept:
        if os.path.islink(name) or not os.path.isdir(name):
            os.unlink(name)
            continue
        import shutil  # slow to import, and rarely needed

        os.chmod(name, 0o700)
        for folder, inner, _ in os.walk(name):
            for one in inner:
                if not os.path.islink(path := os.path.join(folder, one)):
                    os.chmod(path, 0o700)
        shutil.rmtree(name, ignore_errors=True)


def _kill_all(*, isolated: bool) -> None:
    """End every process that a program has left."""
    while True:
        if isolated:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        else:
            with open("/proc/thread-self/children") as file:
                for pid in file.read().split():
                    os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main() -> None:
    """Read the job, run its tests, report each."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    job = json.load(sys.stdin.buffer)
    folder = job["scratch"]
    if job["isolate"]:
        _enter_namespaces()
        child = os.fork()
        if child:
            os.close(1)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
        _build_root(job)
        folder = "/program"
    else:
        _write_program(folder, job)
        os.chdir(folder)
        os.chmod(folder, 0o777)
    _give_up_rights(job["uid"])
    kept = set(os.listdir())  # an interpreter may lie below /tmp
    for given in job["inputs"]:
        print(json.dumps(_run_test(job, folder, given)), flush=True)
        _empty_scratch(kept)


if __name__ == "__main__":
    main()
