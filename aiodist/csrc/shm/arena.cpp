#include "shm/arena.hpp"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "shm/memory.hpp"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace aiodist {
namespace {

constexpr std::size_t kPopulateStep = std::size_t{32} << 20;
// Blocks of at least half of this get huge pages where the system grants them (shmem_enabled: advise or better).
constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::mutex mappings_mutex;
using FileKey = std::pair<std::uint64_t, std::uint64_t>;  // device, inode
std::map<FileKey, std::weak_ptr<Mapping>>& mappings() {
    static auto* const map =
        new std::map<FileKey, std::weak_ptr<Mapping>>;  // never destroyed: arenas may outlive static destruction
    return *map;
}

FileKey key_of(int fd, std::size_t& nbytes) {
    struct stat info{};
    if (::fstat(fd, &info) != 0) {
        throw_errno("fstat of a memory descriptor");
    }
    nbytes = static_cast<std::size_t>(info.st_size);
    return {info.st_dev, info.st_ino};
}

/// Maps at a multiple of the huge page size, without which none could be used.
void* map_aligned(int fd, std::size_t nbytes, int protection) {
    void* const wide =
        ::mmap(nullptr, nbytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (wide == MAP_FAILED) {
        throw_errno("finding room for " + std::to_string(nbytes) + " bytes of shared memory");
    }
    const auto from = reinterpret_cast<std::uintptr_t>(wide);
    const std::uintptr_t aligned = round_up(from, kHugePage);
    void* const at =
        ::mmap(reinterpret_cast<void*>(aligned), nbytes, protection, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
    if (at == MAP_FAILED) {
        const int error = errno;
        ::munmap(wide, nbytes + kHugePage);
        errno = error;
        throw_errno("mapping " + std::to_string(nbytes) + " bytes of shared memory");
    }
    if (aligned > from) {
        ::munmap(wide, aligned - from);
    }
    const std::size_t tail = from + kHugePage - aligned;
    if (tail > 0) {
        ::munmap(reinterpret_cast<void*>(aligned + nbytes), tail);
    }
    return at;
}

std::shared_ptr<Mapping> map_once(int fd, int protection) {
    std::size_t nbytes = 0;
    const FileKey key = key_of(fd, nbytes);
    const std::lock_guard lock(mappings_mutex);
    auto& entry = mappings()[key];
    if (auto known = entry.lock()) {
        return known;
    }
    void* const at = map_aligned(fd, nbytes, protection);
    auto mapping = std::make_shared<Mapping>(static_cast<std::byte*>(at), nbytes);
    entry = mapping;
    std::erase_if(mappings(), [](const auto& item) { return item.second.expired(); });
    return mapping;
}

Fd make_memfd() {
    int fd = ::memfd_create("aiodist", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0) {  // kernels before 6.3 do not know MFD_NOEXEC_SEAL
        fd = ::memfd_create("aiodist", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    }
    if (fd < 0) {
        throw_errno("memfd_create");
    }
    return Fd(fd);
}

}  // namespace

Mapping::~Mapping() { ::munmap(base, nbytes); }

std::shared_ptr<Arena> Arena::create() {
    Fd fd = make_memfd();
    const std::size_t nbytes = round_up(std::max<std::uint64_t>(total_memory(), std::uint64_t{1} << 30), kHugePage);
    if (::ftruncate(fd.get(), static_cast<off_t>(nbytes)) != 0) {
        throw_errno("sizing shared memory");
    }
    // Nobody may shrink it under a reader (that would be a SIGBUS) or change its size at all.
    if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        throw_errno("sealing shared memory");
    }
    Fd read_only(::open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDONLY | O_CLOEXEC));
    if (!read_only) {
        throw_errno("reopening shared memory read-only");
    }
    auto mapping = map_once(fd.get(), PROT_READ | PROT_WRITE);
    std::shared_ptr<Arena> arena(new Arena(std::move(fd), std::move(read_only), std::move(mapping)));
    arena->allocate(sizeof(ArenaHeader));  // the first block: offset 0
    auto* const header = new (arena->at(0)) ArenaHeader{};
    header->layout_version = kLayoutVersion;
    header->pid = ::getpid();
    header->nbytes = arena->nbytes();
    header->magic = kArenaMagic;
    return arena;
}

Arena::Arena(Fd fd, Fd read_only, std::shared_ptr<Mapping> mapping)
    : fd_(std::move(fd)), read_only_(std::move(read_only)), mapping_(std::move(mapping)) {
    free_[0] = mapping_->nbytes;
}

Arena::~Arena() = default;

void Arena::populate(std::uint64_t offset, std::size_t nbytes) {
    if (nbytes % kHugePage == 0) {
        (void)::madvise(at(offset), nbytes, MADV_HUGEPAGE);  // a wish
    }
    for (std::size_t done = 0; done < nbytes;) {
        const std::size_t step = std::min(kPopulateStep, nbytes - done);
        const std::uint64_t have = available_memory();
        // Keep a step's worth of room, so that the ranks which populate at the same time do not all take the last
        // bytes.
        if (have < nbytes - done + kPopulateStep) {
            throw NoMemory(nbytes, have);
        }
        // Through the mapping, so that huge pages can be used; kernels before 5.14 know only the file's way.
        int failed = ::madvise(at(offset + done), step, MADV_POPULATE_WRITE);
        if (failed != 0 && errno == EINVAL) {
            failed = ::fallocate(fd_.get(), 0, static_cast<off_t>(offset + done), static_cast<off_t>(step));
        }
        if (failed != 0 && (errno == ENOSPC || errno == ENOMEM || errno == EFAULT)) {
            throw NoMemory(nbytes, have);
        }
        if (failed != 0 && errno != EINTR && errno != EAGAIN) {
            throw_errno("populating shared memory");
        }
        done += failed == 0 ? step : 0;
    }
}

std::uint64_t Arena::allocate(std::size_t wanted) {
    const std::size_t unit = wanted >= kHugePage / 2 ? kHugePage : kPage;
    const std::size_t nbytes = round_up(std::max<std::size_t>(wanted, 1), unit);
    std::uint64_t offset = 0;
    {
        const std::lock_guard lock(mutex_);
        const auto fits = [&](const auto& item) {
            return round_up(item.first, unit) + nbytes <= item.first + item.second;
        };
        const auto block = std::find_if(free_.begin(), free_.end(), fits);
        if (block == free_.end()) {
            throw NoMemory(nbytes, 0);
        }
        const auto [from, size] = *block;
        offset = round_up(from, unit);
        free_.erase(block);
        if (offset > from) {
            free_[from] = offset - from;
        }
        if (offset + nbytes < from + size) {
            free_[offset + nbytes] = from + size - offset - nbytes;
        }
        used_[offset] = nbytes;
    }
    try {
        populate(offset, nbytes);
    } catch (...) {
        release(offset);
        throw;
    }
    return offset;
}

void Arena::release(std::uint64_t offset) {
    const std::lock_guard lock(mutex_);
    const auto block = used_.find(offset);
    if (block == used_.end()) {
        return;
    }
    std::size_t nbytes = block->second;
    used_.erase(block);
    // Give the pages back; a failure only keeps memory that the next allocation of this range reuses.
    (void)::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                      static_cast<off_t>(nbytes));
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->first == offset + nbytes) {
        nbytes += next->second;
        next = free_.erase(next);
    }
    if (next != free_.begin()) {
        const auto before = std::prev(next);
        if (before->first + before->second == offset) {
            before->second += nbytes;
            return;
        }
    }
    free_[offset] = nbytes;
}

std::optional<std::uint64_t> Arena::offset_of(const void* data, std::size_t nbytes) const noexcept {
    const auto* const at = static_cast<const std::byte*>(data);
    if (at < mapping_->base || at >= mapping_->base + mapping_->nbytes) {
        return std::nullopt;
    }
    const auto offset = static_cast<std::uint64_t>(at - mapping_->base);
    if (nbytes > mapping_->nbytes - offset) {
        return std::nullopt;
    }
    return offset;
}

PeerArena::PeerArena(int fd) {
    std::size_t nbytes = 0;
    (void)key_of(fd, nbytes);
    if (nbytes < sizeof(ArenaHeader)) {
        throw std::runtime_error("a peer's memory is too small to be an arena");
    }
    const int seals = ::fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        throw std::runtime_error("a peer's memory is not sealed against shrinking");
    }
    mapping_ = map_once(fd, PROT_READ);
    if (header().magic != kArenaMagic || header().layout_version != kLayoutVersion) {
        throw std::runtime_error(
            "a peer's shared memory has another layout: all ranks must run one version of aiodist");
    }
}

const std::byte* PeerArena::at(std::uint64_t offset, std::uint64_t nbytes) const noexcept {
    if (offset > mapping_->nbytes || nbytes > mapping_->nbytes - offset) {
        return nullptr;
    }
    return mapping_->base + offset;
}

}  // namespace aiodist
