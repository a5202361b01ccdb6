// Saying what is wrong: the words a person sees when ranks disagree, die or do not come.

#include <algorithm>
#include <cstring>
#include <map>

#include "collectives/blocks.hpp"
#include "collectives/operation.hpp"
#include "communicator.hpp"
#include "messages/messages.hpp"

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

std::string dtype_text(DType dtype, const std::string& text) {
    return dtype == DType::raw && !text.empty() ? text : name(dtype);
}

/// The arrays that a member brings or expects.
std::string arrays_text(const HeaderCopy& copy, int size) {
    const std::string dtype = dtype_text(static_cast<DType>(copy.head.dtype), copy.text);
    if ((copy.head.flags & kMany) != 0) {
        const std::uint64_t count = copy.table.empty() ? 0 : copy.table[0];
        char layout[32];
        (void)std::snprintf(layout, sizeof layout, "%014llx",
                            static_cast<unsigned long long>(copy.table.size() < 2 ? 0 : copy.table[1]));
        return std::to_string(count) + (count == 1 ? " array" : " arrays") + " of " + std::to_string(copy.head.nbytes) +
               " bytes, shapes and dtypes of digest " + layout;
    }
    if ((copy.head.flags & kList) == 0) {
        const int axis = copy.head.axis + (copy.head.axis < 0 ? copy.shape.ndim : 0);
        const bool share = (copy.head.flags & kShare) != 0;
        const bool divided = share && axis >= 0 && axis < copy.shape.ndim;
        Shape shape = copy.shape;
        if (divided) {  // said as the root says it: of the whole
            shape.dims[static_cast<std::size_t>(axis)] *= static_cast<std::uint64_t>(size);
        }
        return std::string(share && !divided ? "a share of " : "") + dtype + " " +
               shape_text(shape.dims.data(), shape.ndim);
    }
    std::string text = "[";
    std::size_t at = 0;
    for (int r = 0; r < size; ++r) {
        const auto array = next_listed(copy.table, at);
        text += (r == 0 ? "" : ", ") + (array ? shape_text(array->dims, array->ndim) : std::string("?"));
    }
    return dtype + " " + text + "]";
}

std::string seconds(Clock::duration duration) {
    const double value = std::chrono::duration<double>(duration).count();
    char text[32];
    (void)std::snprintf(text, sizeof text, "%.3g s", value);
    return text;
}

}  // namespace

std::string shape_text(const std::uint64_t* dims, std::size_t ndim) {
    std::string text = "(";
    for (std::size_t i = 0; i < ndim; ++i) {
        text += (i == 0 ? "" : ", ") + std::to_string(dims[i]);
    }
    return text + (ndim == 1 ? ",)" : ")");
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
    if ((head.flags & kObject) != 0) {
        add((head.flags & kPickled) != 0 ? "an object, pickled" : "an object");
    } else if ((head.flags & kWildcard) != 0) {
        add((head.flags & kMany) != 0 ? "any arrays" : "any array");
    } else if (collective != Collective::barrier) {
        add(arrays_text(copy, size()));
    }
    if (head.op != 0) {
        add(std::string("op=") + aiodist::name(static_cast<Op>(head.op)));
    }
    if (head.root >= 0) {
        add("root=" + std::to_string(head.root));
    }
    const bool along = collective == Collective::all_gather || collective == Collective::reduce_scatter ||
                       collective == Collective::gather || collective == Collective::scatter ||
                       collective == Collective::all_to_all;
    if (along && (head.flags & (kList | kObject)) == 0 && head.axis != kNoAxis) {
        add("axis=" + std::to_string(head.axis));
    }
    if ((head.flags & kUneven) != 0 && (head.flags & kObject) == 0) {
        add("uneven");
    }
    return text + ")" + engine_->site_text(*member(q).process, head.site);
}

std::string Communicator::describe(const Request& request) const {
    const Call& call = request.call;
    const std::string which = is_message(call.collective)
                                  ? std::string(call.collective == Collective::send ? " to" : " from") + " rank " +
                                        std::to_string(call.root) + " with tag " + std::to_string(call.tag)
                                  : " #" + std::to_string(request.seq);
    std::string text = aiodist::name(call.collective) + which + " of group '" + name() + "' (rank " +
                       std::to_string(rank()) + " of " + std::to_string(size());
    if (call.nbytes != 0 && !call.refused && (call.flags & (kList | kMany | kObject)) == 0) {
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
        const std::string broken = "group '" + name() + "' was broken by rank ";
        const bool told = std::string_view(reason).starts_with(broken);  // it heard of it from another itself
        Failure failure{FailureKind::communication, told ? reason : broken + std::to_string(q) + ": " + reason, {}};
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

FailurePtr Communicator::losses(const Request& request) const { return lost(request, waited_for(request)); }

FailurePtr Communicator::lost(const Request& request, const std::vector<int>& waited_for) const {
    std::vector<int> gone;
    std::string how;
    for (const int q : waited_for) {
        const Member& one = member(q);
        if (has_left(q)) {
            gone.push_back(q);
            how = "left";
        } else if (one.process->dead.load(std::memory_order_seq_cst)) {
            gone.push_back(q);
            how = "died (pid " + std::to_string(one.process->pid) + ")";
        }
    }
    if (gone.empty()) {
        return nullptr;
    }
    return std::make_shared<Failure>(
        Failure{FailureKind::peer_lost, describe(request) + ": " + join(gone) + " " + how, gone});
}

FailurePtr Communicator::message_timed_out(const Request& request) const {
    const int q = request.call.root;
    const bool waits = request.call.collective == Collective::recv && request.unmatched.load(std::memory_order_relaxed);
    return std::make_shared<Failure>(Failure{
        FailureKind::timeout,
        describe(request) + engine_->site_text(*engine_->self(), request.call.site) + " timed out after " +
            seconds(request.timeout) + (waits ? ": no such message has come from " : " waiting for ") + join({q}),
        {q}});
}

FailurePtr Communicator::message_mismatch(const Request& request, const Record& head, const Shape& shape,
                                          const std::string& text) const {
    const int q = request.call.root;
    const Call& call = request.call;
    return std::make_shared<Failure>(Failure{
        FailureKind::mismatch,
        describe(request) + ": the ranks asked for different things\n  rank " + std::to_string(rank()) + ": recv(" +
            dtype_text(call.dtype, call.text) + " " + shape_text(call.shape.dims.data(), call.shape.ndim) + ")" +
            engine_->site_text(*engine_->self(), call.site) + "\n  rank " + std::to_string(q) + ": send(" +
            dtype_text(static_cast<DType>(head.dtype), text) + " " + shape_text(shape.dims.data(), shape.ndim) + ")" +
            engine_->site_text(*member(q).process, head.site),
        {q}});
}

FailurePtr Communicator::withdrawn() const {
    return std::make_shared<Failure>(
        Failure{FailureKind::withdrawn, "the receive was withdrawn: nobody waited for it any more", {}});
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
                std::to_string(posted) + (posted == 1 ? " call" : " calls");
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

FailurePtr Communicator::look_at_messages(TimePoint now) const {
    if (!messages_ || !messages_->pending()) {
        return nullptr;
    }
    FailurePtr failure = aborts(kNever - 1);  // messages have no place in the order: any failure of the group is theirs
    return failure ? failure : messages_->trouble(now);
}

// In this order: flags were looked at just before, then aborts, deaths, deadlines.
FailurePtr Communicator::look_for_trouble(TimePoint now) const {
    const Request* const lowest = lowest_pending();
    if (FailurePtr failure = look_at_messages(now)) {
        return failure;
    }
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
