// Reading headers, comparing them, and saying what is wrong: the words a person sees when ranks disagree, die or do not
// come.

#include <algorithm>
#include <cstring>
#include <map>

#include "collectives/operation.hpp"
#include "communicator.hpp"

namespace aiodist {
namespace {

std::string join(const std::vector<int>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (std::size_t i = 0; i < ranks.size();) {
        std::size_t last = i;
        while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
            ++last;
        }
        text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
        if (last > i) {
            text += (last == i + 1 ? ", " : "-") + std::to_string(ranks[last]);
        }
        i = last + 1;
    }
    return text;
}

std::string shape_text(const std::uint64_t* dims, std::size_t ndim) {
    std::string text = "(";
    for (std::size_t i = 0; i < ndim; ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
    }
    return text + (ndim == 1 ? ",)" : ")");
}

std::string dtype_text(DType dtype, const std::string& text) {
    return dtype == DType::raw && !text.empty() ? text : name(dtype);
}

std::string seconds(Clock::duration duration) {
    const double value = std::chrono::duration<double>(duration).count();
    char text[32];
    (void)std::snprintf(text, sizeof text, "%.3g s", value);
    return text;
}

/// True where the arrays that two members brought are alike.
bool same_array(const HeaderCopy& a, const HeaderCopy& b) {
    return a.head.dtype == b.head.dtype && a.head.itemsize == b.head.itemsize && a.head.nbytes == b.head.nbytes &&
           a.shape.ndim == b.shape.ndim && a.text == b.text &&
           std::equal(a.shape.dims.begin(), a.shape.dims.begin() + a.shape.ndim, b.shape.dims.begin());
}

bool wildcard(const HeaderCopy& copy) { return (copy.head.flags & kWildcard) != 0; }

/// True where `other` asks for the same as `mine`, arrays included.
bool agrees(const HeaderCopy& mine, const HeaderCopy& other) {
    if (mine.head.collective != other.head.collective) {
        return false;
    }
    switch (static_cast<Collective>(mine.head.collective)) {
        case Collective::barrier:
            return true;
        case Collective::all_reduce:
            return mine.head.op == other.head.op && same_array(mine, other);
        case Collective::reduce_scatter:
            return mine.head.op == other.head.op && mine.head.axis == other.head.axis && same_array(mine, other);
        case Collective::all_gather:
            return mine.head.axis == other.head.axis && same_array(mine, other);
        case Collective::broadcast:
            return mine.head.root == other.head.root && (wildcard(mine) || wildcard(other) || same_array(mine, other));
        default:
            return false;
    }
}

}  // namespace

bool Communicator::read_header(int q, std::uint64_t seq, HeaderCopy& copy) {
    const std::byte* const at = member(q).slots + seq % tuning().slots * slot_stride(tuning());
    Header& head = copy.head;
    std::memcpy(&head, at, sizeof head);
    const std::size_t shape_nbytes = head.ndim * sizeof(std::uint64_t);
    if (head.seq != seq || head.ndim > kMaxDims || sizeof head + shape_nbytes + head.extra_nbytes > kMetaNbytes ||
        (head.kind != static_cast<std::uint8_t>(HeaderKind::call) &&
         head.kind != static_cast<std::uint8_t>(HeaderKind::refused))) {
        return false;
    }
    copy.shape.ndim = head.ndim;
    std::memcpy(copy.shape.dims.data(), at + sizeof head, shape_nbytes);
    const char* const text = reinterpret_cast<const char*>(at + sizeof head + shape_nbytes);
    copy.text.assign(text, head.extra_nbytes);
    copy.payload = at + payload_at(sizeof head + shape_nbytes + head.extra_nbytes, head.nbytes);
    if (head.kind == static_cast<std::uint8_t>(HeaderKind::refused)) {
        return true;  // nothing of it is used but its text
    }
    if (wildcard(copy)) {
        return head.nbytes == 0 && head.ndim == 0 &&
               head.collective == static_cast<std::uint8_t>(Collective::broadcast);
    }
    // The extents must say what nbytes says: both are used to compute addresses.
    std::uint64_t nbytes = head.itemsize;
    for (std::size_t i = 0; i < head.ndim; ++i) {
        if (__builtin_mul_overflow(nbytes, copy.shape.dims[i], &nbytes)) {
            return false;
        }
    }
    const std::size_t item = itemsize(static_cast<DType>(head.dtype));
    const bool barrier = head.collective == static_cast<std::uint8_t>(Collective::barrier);
    return barrier || (nbytes == head.nbytes && (item == 0 || item == head.itemsize));
}

bool Communicator::all_small() const noexcept {
    return std::all_of(headers_.begin(), headers_.end(),
                       [this](const HeaderCopy& copy) { return copy.head.nbytes <= tuning().slot_nbytes; });
}

FailurePtr Communicator::verdict(const Request& request) const {
    const HeaderCopy& mine = header(rank());
    bool good = true;
    for (const HeaderCopy& copy : headers_) {
        if (copy.head.kind == static_cast<std::uint8_t>(HeaderKind::refused)) {
            return refusals(request);
        }
        good = good && agrees(mine, copy);
    }
    if (good && mine.head.collective == static_cast<std::uint8_t>(Collective::broadcast)) {
        // Two receivers that know what to expect were each compared with me; the root decides for all.
        const int root = mine.head.root;
        good =
            root >= 0 && root < size() && !wildcard(header(root)) &&
            std::all_of(
                headers_.begin(), headers_.end(), [&](const HeaderCopy& copy) { return agrees(header(root), copy); });
    }
    return good ? nullptr : mismatch(request);
}

FailurePtr Communicator::refusals(const Request& request) const {
    auto failure = std::make_shared<Failure>(Failure{FailureKind::refused, {}, {}});
    std::string reasons;
    for (int q = 0; q < size(); ++q) {
        const HeaderCopy& copy = header(q);
        if (copy.head.kind == static_cast<std::uint8_t>(HeaderKind::refused)) {
            failure->ranks.push_back(q);
            reasons += "\n  rank " + std::to_string(q) + ": " + copy.text +
                       engine_->site_text(*member(q).process, copy.head.site);
        }
    }
    failure->text = describe(request) + ": " + join(failure->ranks) + " refused the call" + reasons;
    return failure;
}

/// Ends the future of the next call where a peer has refused it, though other members are still to come. The call
/// itself stays in the order and touches no array any more: its verdict will be the same.
void Communicator::hear_refusals() {
    Request* const head = posted_.front();
    if (head == nullptr || head->done()) {
        return;
    }
    for (int q = 0; q < size(); ++q) {
        HeaderCopy& copy = headers_[static_cast<std::size_t>(q)];
        copy.head.kind = 0;
        const bool posted = member(q).block->posted.load(std::memory_order_seq_cst) > head->seq;  // acquires the slot
        if (posted && !read_header(q, head->seq, copy)) {
            return;  // damaged: match() says so
        }
    }
    FailurePtr failure = refusals(*head);
    if (!failure->ranks.empty()) {
        head->finish(std::move(failure));
    }
}

FailurePtr Communicator::mismatch(const Request& request) const {
    std::map<std::string, std::vector<int>> asked;
    for (int q = 0; q < size(); ++q) {
        asked[describe(q, header(q))].push_back(q);
    }
    std::vector<std::pair<std::vector<int>, std::string>> sides;
    for (auto& [text, ranks] : asked) {
        sides.emplace_back(ranks, text);
    }
    std::sort(sides.begin(), sides.end());
    const auto largest = std::max_element(sides.begin(), sides.end(),
                                          [](const auto& a, const auto& b) { return a.first.size() < b.first.size(); });
    auto failure = std::make_shared<Failure>(Failure{FailureKind::mismatch, {}, {}});
    std::string lines;
    for (const auto& [ranks, text] : sides) {
        lines += "\n  " + join(ranks) + ": " + text;
        if (ranks != largest->first) {
            failure->ranks.insert(failure->ranks.end(), ranks.begin(), ranks.end());
        }
    }
    std::sort(failure->ranks.begin(), failure->ranks.end());
    failure->text = "call #" + std::to_string(request.seq) + " of group '" + name() +
                    "': the ranks asked for different things" + lines;
    return failure;
}

std::string Communicator::describe(int q, const HeaderCopy& copy) const {
    const Header& head = copy.head;
    const auto collective = static_cast<Collective>(head.collective);
    std::string text = aiodist::name(collective);
    text += "(";
    std::string separator;
    const auto add = [&](const std::string& field) {
        text += separator + field;
        separator = ", ";
    };
    if (collective != Collective::barrier) {
        add(wildcard(copy) ? "any array"
                           : dtype_text(static_cast<DType>(head.dtype), copy.text) + " " +
                                 shape_text(copy.shape.dims.data(), copy.shape.ndim));
    }
    if (head.op != 0) {
        add(std::string("op=") + aiodist::name(static_cast<Op>(head.op)));
    }
    if (head.root >= 0) {
        add("root=" + std::to_string(head.root));
    }
    if (collective == Collective::all_gather || collective == Collective::reduce_scatter) {
        add("axis=" + std::to_string(head.axis));
    }
    return text + ")" + engine_->site_text(*member(q).process, head.site);
}

std::string Communicator::describe(const Request& request) const {
    const Call& call = request.call;
    std::string text = std::string(aiodist::name(call.collective)) + " #" + std::to_string(request.seq) +
                       " of group '" + name() + "' (rank " + std::to_string(rank()) + " of " + std::to_string(size());
    if (call.nbytes != 0 && !call.refused) {
        text += ", " + dtype_text(call.dtype, call.text) + " " + shape_text(call.shape.dims.data(), call.shape.ndim);
    }
    return text + ")";
}

bool Communicator::aborted_by_peer(std::uint64_t seq) const noexcept {
    return std::any_of(members_.begin(), members_.end(), [seq](const Member& one) {
        return one.block->abort_from.load(std::memory_order_seq_cst) <= seq;  // after the last read of the call's data
    });
}

FailurePtr Communicator::aborts(std::uint64_t lowest) const {
    for (int q = 0; q < size(); ++q) {
        const ChannelBlock& block = *member(q).block;
        if (q == rank() || block.abort_from.load(std::memory_order_seq_cst) > lowest) {  // acquires the reason
            continue;
        }
        char reason[kReasonNbytes];
        std::memcpy(reason, block.reason, sizeof reason);
        reason[kReasonNbytes - 1] = '\0';
        Failure failure{FailureKind::communication,
                        "group '" + name() + "' was broken by rank " + std::to_string(q) + ": " + reason,
                        {}};
        // What a peer found out holds for all: who is lost or late, or that the calls differ.
        for (const FailureKind kind :
             {FailureKind::timeout, FailureKind::peer_lost, FailureKind::mismatch, FailureKind::transport}) {
            failure.kind = block.abort_kind == static_cast<std::uint32_t>(kind) ? kind : failure.kind;
        }
        for (int named = 0; named < std::min(size(), static_cast<int>(kMaxNamedRanks)); ++named) {
            const auto bit = static_cast<std::size_t>(named);
            if ((block.abort_ranks[bit / 64] >> bit % 64 & 1) != 0) {
                failure.ranks.push_back(named);
            }
        }
        return std::make_shared<Failure>(std::move(failure));
    }
    return nullptr;
}

std::vector<int> Communicator::waited_for(const Request& request) const {
    if (!large_.empty() && large_.front().request.get() == &request) {
        return large_.front().operation->waits_for();
    }
    std::vector<int> ranks;
    for (int q = 0; q < size(); ++q) {
        if (member(q).block->posted.load(std::memory_order_seq_cst) <= request.seq) {
            ranks.push_back(q);
        }
    }
    return ranks;
}

FailurePtr Communicator::losses(const Request& request) const {
    std::vector<int> lost;
    std::string how;
    for (const int q : waited_for(request)) {
        const Member& one = member(q);
        if (q != rank() && one.block->left.load(std::memory_order_seq_cst) != 0) {
            lost.push_back(q);
            how = "left";
        } else if (one.process->dead.load(std::memory_order_seq_cst)) {
            lost.push_back(q);
            how = "died (pid " + std::to_string(one.process->pid) + ")";
        }
    }
    if (lost.empty()) {
        return nullptr;
    }
    return std::make_shared<Failure>(
        Failure{FailureKind::peer_lost, describe(request) + ": " + join(lost) + " " + how, lost});
}

FailurePtr Communicator::timed_out(const Request& request) const {
    std::vector<int> missing = waited_for(request);
    std::erase(missing, rank());
    std::string text = describe(request) + engine_->site_text(*engine_->self(), request.call.site) +
                       " timed out after " + seconds(request.timeout) + " waiting for " +
                       (missing.empty() ? std::string("its turn") : join(missing));
    for (const int q : missing) {
        const std::uint64_t posted = member(q).block->posted.load(std::memory_order_seq_cst);
        text += (q == missing.front() ? " (" : "; ") + ("rank " + std::to_string(q)) + " has made " +
                std::to_string(posted) + " calls";
    }
    text += missing.empty() ? "" : ")";
    return std::make_shared<Failure>(Failure{FailureKind::timeout, std::move(text), std::move(missing)});
}

const Request* Communicator::earliest_overdue(TimePoint now) const {
    const auto overdue = [now](const Request* request) -> const Request* {
        for (; request != nullptr; request = request->next) {
            if (request->deadline <= now) {
                return request;
            }
        }
        return nullptr;
    };
    for (const Moving& moving : large_) {
        if (moving.request->deadline <= now) {
            return moving.request.get();
        }
    }
    const Request* const found = overdue(posted_.front());
    return found != nullptr ? found : overdue(unposted_.front());
}

// In this order: flags were looked at just before, then aborts, deaths, deadlines.
FailurePtr Communicator::look_for_trouble(TimePoint now) const {
    const Request* const lowest = lowest_pending();
    if (lowest == nullptr) {
        return nullptr;
    }
    if (FailurePtr failure = aborts(lowest->seq)) {
        return failure;
    }
    if (FailurePtr failure = losses(*lowest)) {
        return failure;
    }
    if (const Request* const head = posted_.front(); head != nullptr && head != lowest) {
        if (FailurePtr failure = losses(*head)) {
            return failure;
        }
    }
    const Request* const late = earliest_overdue(now);
    return late == nullptr ? nullptr : timed_out(*late);
}

}  // namespace aiodist
