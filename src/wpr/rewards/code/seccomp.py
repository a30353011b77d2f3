"""The system calls that a generated program may not make, as a filter program for the kernel (seccomp, classic BPF)."""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in the kernel's struct seccomp_data, little endian
CLONE_THREAD = 0x00010000
AF_UNIX = 1
LAST_KNOWN = 450
"""Calls of newer kernels do not exist for the program: what is not known cannot be judged."""

CLONE3 = 435  # its flags are behind a pointer, where a filter cannot look; without it, libc uses clone
DENIED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """Numbers of system calls on one kind of processor."""

    audit: int
    clone: int
    socketpair: int
    denied: dict[str, int]


# Denied are: new processes (a program is one process, so that the limit on memory is the whole truth); other programs;
# other processes' memory; mounts and namespaces; kernel interfaces with a history; memory that no limit counts (memfd,
# System V); sockets, for there are families that a network namespace does not confine; keys; clock, host name, modules;
# other processors than the one that the program was given.
ARCHITECTURES = {
    "x86_64": Architecture(
        audit=0xC000003E,
        clone=56,
        socketpair=53,
        denied={
            "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "ptrace": 101, "process_vm_readv": 310,
            "process_vm_writev": 311, "kcmp": 312, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
            "unshare": 272, "setns": 308, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "memfd_create": 319,
            "shmget": 29, "shmat": 30, "msgget": 68, "semget": 64, "mq_open": 240, "add_key": 248, "request_key": 249,
            "keyctl": 250, "socket": 41, "personality": 135, "open_by_handle_at": 304, "name_to_handle_at": 303,
            "quotactl": 179, "acct": 163, "swapon": 167, "swapoff": 168, "reboot": 169, "kexec_load": 246,
            "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176, "iopl": 172,
            "ioperm": 173, "modify_ldt": 154, "syslog": 103, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159,
            "clock_adjtime": 305, "sethostname": 170, "setdomainname": 171, "mbind": 237, "set_mempolicy": 238,
            "migrate_pages": 256, "move_pages": 279, "fanotify_init": 300, "vmsplice": 278, "io_setup": 206,
            "lookup_dcookie": 212, "nfsservctl": 180, "vhangup": 153, "sched_setaffinity": 203,
        },
    ),
    "aarch64": Architecture(
        audit=0xC00000B7,
        clone=220,
        socketpair=199,
        denied={
            "execve": 221, "execveat": 281, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
            "kcmp": 272, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268,
            "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "memfd_create": 279, "shmget": 194, "shmat": 196,
            "msgget": 186, "semget": 190, "mq_open": 180, "add_key": 217, "request_key": 218, "keyctl": 219,
            "socket": 198, "personality": 92, "open_by_handle_at": 265, "name_to_handle_at": 264, "quotactl": 60,
            "acct": 89, "swapon": 224, "swapoff": 225, "reboot": 142, "kexec_load": 104, "kexec_file_load": 294,
            "init_module": 105, "finit_module": 273, "delete_module": 106, "syslog": 116, "settimeofday": 170,
            "clock_settime": 112, "adjtimex": 171, "clock_adjtime": 266, "sethostname": 161, "setdomainname": 162,
            "mbind": 235, "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239, "fanotify_init": 262,
            "vmsplice": 75, "io_setup": 0, "lookup_dcookie": 18, "nfsservctl": 42, "vhangup": 58,
            "sched_setaffinity": 122,
        },
    ),
}  # fmt: skip


def filter_program(machine: str) -> bytes | None:
    """The filter for a processor (``platform.machine()``), as the kernel's ``struct sock_filter[]``.

    None where the numbers are not known. Denied calls fail with EPERM, which Python raises as ``PermissionError``;
    unknown ones with ENOSYS. A call in another convention (32-bit calls have other numbers) ends the program.
    """
    known = ARCHITECTURES.get(machine)
    if known is None:
        return None
    deny, missing = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
    steps = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, known.audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, missing),
        (ABOVE, 0, 1, LAST_KNOWN),  # with them, x86's third convention (x32), whose numbers start at 2^30
        (RETURN, 0, 0, missing),
    ]
    for number in sorted({*known.denied.values(), *DENIED_EVERYWHERE.values()}):
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, deny)]
    steps += [
        (EQUAL, 0, 4, known.clone),  # threads only
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (ANY_BIT, 0, 1, CLONE_THREAD),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, deny),
        (EQUAL, 0, 4, known.socketpair),  # pipes with two ends, which asyncio needs
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (EQUAL, 0, 1, AF_UNIX),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, deny),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)
