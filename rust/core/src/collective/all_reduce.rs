//! all_reduce, reduce and barrier: which way to take. And all_reduce inside of each host.

use super::{Context, between, local};
use crate::Result;
use crate::buffer::Buffer;
use crate::coding::{Coding, mix};
use crate::dtype::Op;

/// The ways, see the files named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Nobody to talk to.
    Alone,
    /// One host: `local`.
    Local,
    /// Several hosts, short data: each host's sum to everyone, one delay: `between::exchange`.
    Exchange,
    /// Several hosts, long data: everyone sums a share: `between::scatter_gather`.
    ScatterGather,
}

/// Chooses a way: `bytes` of data, `largest` ranks on the fullest of `hosts` hosts.
///
/// With n hosts an exchange sends (n−1)·S from each rank in one delay and scatter-gather 2(n−1)/n·S from a host in two, so
/// the exchange wins as long as the bytes that it sends more take no longer than a delay; `exchange` stands for the bytes
/// of a delay.
pub fn choose(bytes: usize, hosts: usize, largest: usize, inline: usize, exchange: usize) -> Way {
    match (hosts, largest) {
        (1, 1) => Way::Alone,
        (1, _) => Way::Local,
        _ if (hosts - 1) * largest * bytes <= exchange && (largest == 1 || bytes <= inline) => Way::Exchange,
        _ => Way::ScatterGather,
    }
}

/// Reduces `buffer` over the group; the result goes to every member, or to one.
pub(crate) fn run(
    context: &mut Context<'_>,
    buffer: Buffer,
    op: Op,
    coding: Option<Coding>,
    only: Option<usize>,
) -> Result<()> {
    let hosts = &context.layout.hosts;
    let largest = hosts.iter().map(Vec::len).max().unwrap_or(1);
    let divisor = (op == Op::Mean).then_some(context.ranks.len() as u32);
    let tuning = context.tuning;
    // random numbers that nobody gave depend on the call
    let coding = coding.map(|coding| match coding.blocks.is_empty() {
        true => Coding { stream: mix(mix(coding.stream, context.group), context.sequence), ..coding },
        false => coding,
    });
    // in an exchange several ranks would keep the residuals of the same share
    let exchange = if coding.as_ref().is_some_and(|coding| coding.residuals.is_some()) { 0 } else { tuning.exchange };
    match choose(buffer.bytes(), hosts.len(), largest, tuning.inline, exchange) {
        Way::Alone => Ok(()),
        Way::Local => {
            let only = only.map(|member| context.layout.seat(member).1);
            local::all_reduce(context, buffer, op, divisor, only)
        }
        Way::Exchange => between::exchange(context, buffer, op, divisor, coding, only),
        Way::ScatterGather => between::scatter_gather(context, buffer, op, divisor, coding, only),
    }
}

/// Reduces `buffer` over the members on each host. Hosts do not hear of each other.
pub(crate) fn in_host(context: &mut Context<'_>, buffer: Buffer, op: Op) -> Result<()> {
    let members = context.layout.hosts[context.layout.seat(context.me).0].len();
    match members {
        1 => Ok(()),
        _ => local::all_reduce(context, buffer, op, (op == Op::Mean).then_some(members as u32), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_by_size_and_place() {
        let way = |bytes, hosts, largest| choose(bytes, hosts, largest, 1 << 14, 1 << 16);
        assert_eq!(way(1 << 30, 1, 1), Way::Alone);
        assert_eq!(way(0, 1, 4), Way::Local);
        assert_eq!(way(1000, 4, 1), Way::Exchange);
        assert_eq!(way(1 << 16, 2, 1), Way::Exchange);
        assert_eq!(way(1 << 16, 2, 2), Way::ScatterGather);
        assert_eq!(way(1 << 16, 3, 1), Way::ScatterGather);
        assert_eq!(way(0, 1000, 8), Way::Exchange);
    }
}
