"""The walls: namespaces, a private root, no privileges, resource limits. Linux only; every
function raises OSError where the kernel refuses.

Source: namespaces(7), user_namespaces(7), mount_setattr(2), pivot_root(2), capabilities(7).
"""

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_SYS_CLONE3, _SYS_MOUNT_SETATTR = 435, 442  # the same numbers everywhere
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 47, 2
_CAPABILITY_VERSION_3, _CAP_DAC_READ_SEARCH = 0x20080522, 2
_CAP_SETPCAP, _CAP_SYS_ADMIN = 8, 21

ROOT = Path("/sys")
"""Mount point of the new root, seen by the launcher only. It exists everywhere, without Python."""
SCRATCH = Path("/tmp")
PYTHON = Path("/python")
"""The path of the Python installation as programs see it."""
PACKAGES = Path("/packages")
"""The path of the installed packages as programs see it."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SHARED_MEMORY = Path("/dev/shm")
_STREAMS = (Path("/dev/stdin"), Path("/dev/stdout"), Path("/dev/stderr"))
"""Only names, for who asks whether they exist; Python opens the streams (``_RUN_PROGRAM``)."""
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_LOADER_CACHE = "/etc/ld.so.cache"
MAX_FILES = 128
"""Open at once, in one process."""
_STACK_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object, shown_as: str | None = None) -> None:
    if _libc[name](*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{shown_as or name}: {os.strerror(number)}")


def _mount(source: str, target: Path, kind: str, flags: int, options: str = "") -> None:
    args = (source.encode(), bytes(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _call("mount", *args, shown_as=f"mount of {source} on {target}")


def build_root(visible: dict[str, str], code: Path, user: int) -> int | None:
    """Leave the host's namespaces for users, mounts, network and host name, and build at ``ROOT``
    what a program will see: libraries, ``visible``, five devices; read-only.

    Args:
        code: the folder that is ``/tmp`` until ``hide_own_code``.
        visible: files and folders by the paths at which programs read them.
        user: id that programs run under where this process is root; no other process should have
            it, since processes are counted by user.

    Returns:
        The id that ``drop_privileges`` shall change to; None where it is right already.
    """
    change_to = None
    if os.geteuid() == 0:
        try:
            _call("unshare", _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWUTS)
            change_to = user
        except PermissionError:  # root of a container without CAP_SYS_ADMIN
            _become(user)
            _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # or /proc/self would be root's
    if change_to is None:
        uid, gid = os.geteuid(), os.getegid()
        _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWUTS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount("none", Path("/"), "none", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in map(Path, (*_LIBRARIES, *_DEVICES, _LOADER_CACHE)):
        if path.is_symlink():
            _inside(path).symlink_to(path.readlink())
        elif path.exists():
            _show(path, path)
    for target, source in visible.items():
        _show(Path(source), Path(target))
    _show(code, SCRATCH)
    for path in _STREAMS:
        _inside(path).touch()
    _inside(_SHARED_MEMORY).symlink_to(SCRATCH)  # locks between processes are files there
    read_only = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    args = (_AT_FDCWD, bytes(ROOT), _AT_RECURSIVE, ctypes.byref(read_only), ctypes.c_size_t(32))
    _call("syscall", _SYS_MOUNT_SETATTR, *args, shown_as="mount_setattr")
    return change_to


def _inside(path: Path) -> Path:
    return ROOT / path.relative_to("/")


def _show(source: Path, at: Path) -> None:
    target = _inside(at)
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    _mount(str(source), target, "none", _MS_BIND | _MS_REC)


def enter_root() -> None:
    """Make ``ROOT`` the root, forget the host's files, and keep through the next exec what
    ``fork_within`` and ``enter_scratch`` need."""
    _call("unshare", _CLONE_NEWNS)
    os.chdir(ROOT)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir(SCRATCH)
    if os.geteuid() != 0:
        _keep_only(1 << _CAP_SYS_ADMIN | 1 << _CAP_SETPCAP)


def hide_own_code() -> None:
    """Leave an empty ``/tmp``."""
    os.chdir("/")
    _call("umount2", bytes(SCRATCH), _MNT_DETACH)


def fork_within() -> int:
    """``os.fork``, but the child is process 1 of new namespaces: when it ends, all in there end."""
    flags = _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWNS
    arguments = (ctypes.c_uint64 * 8)(flags, 0, 0, 0, signal.SIGCHLD)  # struct clone_args
    ctypes.pythonapi.PyOS_BeforeFork()
    # through PyDLL, which holds the interpreter's lock, as os.fork does
    pid = ctypes.PyDLL(None, use_errno=True).syscall(_SYS_CLONE3, arguments, ctypes.c_size_t(64))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), f"clone3: {os.strerror(ctypes.get_errno())}")
    return int(pid)


def enter_scratch(scratch_bytes: int) -> None:
    """Enter an empty ``/tmp`` of that size."""
    options = f"size={scratch_bytes},nr_inodes=4096,mode=1777"
    _mount("tmpfs", SCRATCH, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.chdir(SCRATCH)


def drop_bounding_set(may_read_all: bool = False) -> None:
    """No exec can gain a capability, except, on request, that to read every file."""
    for capability in range(64):
        if may_read_all and capability == _CAP_DAC_READ_SEARCH:
            continue
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # the kernel knows no more, or there are no privileges to drop


def drop_privileges(change_to: int | None, may_read_all: bool = False) -> None:
    """No capability, no way to gain one, nobody may trace this process, and it dies with its
    parent.

    Args:
        may_read_all: where root changes to another id, keep the right to read every file: without
            walls, this Python may lie where only root can read.
    """
    if change_to is not None:
        _libc.prctl(_PR_SET_KEEPCAPS, int(may_read_all), 0, 0, 0)
        _become(change_to)
    capabilities = 1 << _CAP_DAC_READ_SEARCH if change_to is not None and may_read_all else 0
    if not capabilities or not _keep_only(capabilities):
        _keep_only(0)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    die_with_parent()


def _keep_only(capabilities: int) -> bool:
    """These and no others, also after the next exec; False if there are not even these."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)(capabilities, capabilities, capabilities, 0, 0, 0)
    if _libc.capset(ctypes.byref(header), ctypes.byref(sets)) != 0:
        return False
    return all(
        _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0) == 0
        for capability in range(32)
        if capabilities >> capability & 1
    )


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def die_with_parent() -> None:
    """This process is killed when its parent ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Processes whose parents ended become children of this one."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def num_tasks_of_user() -> int:
    """Processes and threads that this user has: ``RLIMIT_NPROC`` counts them all."""
    count = 0
    for folder in list(Path("/proc").iterdir()):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if folder.name.isdecimal() and folder.stat().st_uid == os.geteuid():
                count += sum(1 for _ in (folder / "task").iterdir())
    return count


def limit_fork_server() -> None:
    """Set limits before an interpreter starts, as all threads get its first stack limit."""
    _limit({resource.RLIMIT_STACK: _STACK_BYTES, resource.RLIMIT_NOFILE: MAX_FILES})


def limit(limits: dict[str, int]) -> None:
    """Set the hard limits that the kernel counts per process, or per user for processes."""
    wanted = {
        resource.RLIMIT_CPU: limits["cpu_seconds"] + 1,  # where the supervisor is too slow
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_STACK: min(_STACK_BYTES, limits["memory_bytes"]),
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    _limit(wanted)


def _limit(wanted: dict[int, int]) -> None:
    for name, value in wanted.items():
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
