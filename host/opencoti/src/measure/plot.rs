//! Charts as SVG: lines and labelled points on linear or logarithmic axes, light enough to be written by hand.

use std::fmt::Write;

/// Width of a page, in pixels.
const WIDTH: f64 = 860.0;
/// Height of a chart, title and legend included.
const HEIGHT: f64 = 420.0;
/// Room to the left, right, top and bottom of the drawing.
const MARGINS: [f64; 4] = [78.0, 210.0, 44.0, 56.0];
/// Colours that people with any colour vision tell apart (Okabe and Ito, 2008).
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31"];

/// How values become places on an axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scale {
    /// Evenly, from 0.
    Linear,
    /// By powers of ten; values that are not positive are left out.
    Log,
}

/// How a series is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Style {
    /// Points joined by a line.
    Line,
    /// As `Line`, dashed and without points: a bound.
    Dashed,
    /// Points with the series' name beside each.
    Points,
}

/// Values that belong together.
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// How it is drawn.
    pub style: Style,
    /// Values of x and y.
    pub points: Vec<(f64, f64)>,
}

/// An axis.
pub struct Axis {
    /// What it shows, with its unit.
    pub title: &'static str,
    /// How.
    pub scale: Scale,
}

/// One chart.
pub struct Chart {
    /// What it shows.
    pub title: String,
    /// To the right.
    pub x: Axis,
    /// Upwards.
    pub y: Axis,
    /// What is drawn; the order gives the colours.
    pub series: Vec<Series>,
}

/// Charts below each other, as an SVG document.
pub fn page(charts: &[Chart]) -> String {
    let height = HEIGHT * charts.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (i, chart) in charts.iter().enumerate() {
        let _ = writeln!(out, "<g transform=\"translate(0 {})\">", HEIGHT * i as f64);
        chart.draw(&mut out);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

impl Chart {
    fn draw(&self, out: &mut String) {
        let [left, right, top, bottom] = MARGINS;
        let visible = |&(x, y): &(f64, f64)| self.x.shows(x) && self.y.shows(y);
        let points = || self.series.iter().flat_map(|s| &s.points).copied().filter(|p| visible(p));
        let x = self.x.placed(points().map(|p| p.0), left, WIDTH - right);
        let y = self.y.placed(points().map(|p| p.1), HEIGHT - bottom, top);
        text(out, left, top - 18.0, "start", &format!("font-size=\"15\" {BOLD}"), &self.title);
        self.draw_axes(out, &x, &y);
        for (i, series) in self.series.iter().enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            let shown: Vec<(f64, f64)> =
                series.points.iter().filter(|p| visible(p)).map(|p| (x.place(p.0), y.place(p.1))).collect();
            series.draw(out, colour, &shown);
            let (at, line) = (WIDTH - right + 14.0, top + 8.0 + 18.0 * i as f64);
            let dash = series.style.dash();
            let _ = writeln!(
                out,
                "<line x1=\"{at}\" y1=\"{line}\" x2=\"{}\" y2=\"{line}\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>",
                at + 18.0
            );
            text(out, at + 24.0, line + 4.0, "start", "", &series.name);
        }
    }

    fn draw_axes(&self, out: &mut String, x: &Placed, y: &Placed) {
        let [left, right, top, bottom] = MARGINS;
        let (end, base) = (WIDTH - right, HEIGHT - bottom);
        for (value, label) in x.ticks() {
            let at = x.place(value);
            let _ =
                writeln!(out, "<line x1=\"{at:.1}\" y1=\"{top}\" x2=\"{at:.1}\" y2=\"{base}\" stroke=\"#e4e4e4\"/>");
            text(out, at, base + 18.0, "middle", "", &label);
        }
        for (value, label) in y.ticks() {
            let at = y.place(value);
            let _ =
                writeln!(out, "<line x1=\"{left}\" y1=\"{at:.1}\" x2=\"{end}\" y2=\"{at:.1}\" stroke=\"#e4e4e4\"/>");
            text(out, left - 8.0, at + 4.0, "end", "", &label);
        }
        let _ = writeln!(out, "<path d=\"M{left} {top}V{base}H{end}\" fill=\"none\" stroke=\"#444\"/>");
        text(out, (left + end) / 2.0, base + 42.0, "middle", "", self.x.title);
        let middle = (top + base) / 2.0;
        text(out, 18.0, middle, "middle", &format!("transform=\"rotate(-90 18 {middle})\""), self.y.title);
    }
}

const BOLD: &str = "font-weight=\"bold\"";

impl Series {
    fn draw(&self, out: &mut String, colour: &str, shown: &[(f64, f64)]) {
        if self.style != Style::Points {
            let path: Vec<String> = shown.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let dash = self.style.dash();
            let path = path.join(" ");
            let _ = writeln!(
                out,
                "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dash}/>"
            );
        }
        if self.style == Style::Dashed {
            return;
        }
        for (x, y) in shown {
            let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"{colour}\"/>");
            if self.style == Style::Points {
                text(out, x + 7.0, y - 6.0, "start", "font-size=\"11\"", &self.name);
            }
        }
    }
}

impl Style {
    fn dash(self) -> &'static str {
        if self == Style::Dashed { " stroke-dasharray=\"6 4\"" } else { "" }
    }
}

impl Axis {
    fn shows(&self, value: f64) -> bool {
        value.is_finite() && (self.scale == Scale::Linear || value > 0.0)
    }

    /// The axis from pixel `from` to `to` with room for the values.
    fn placed(&self, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Placed {
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let (low, high) = match self.scale {
            _ if low > high => (1.0, 10.0),
            Scale::Linear => {
                let step = step(high.max(f64::MIN_POSITIVE) - low.min(0.0));
                ((low.min(0.0) / step).floor() * step, (high / step).ceil().max(1.0) * step)
            }
            Scale::Log => (10f64.powf(low.log10().floor()), 10f64.powf((high.log10() + 1e-9).ceil())),
        };
        let high = if high > low { high } else { low * 10.0 };
        Placed { scale: self.scale, low, high, from, to }
    }
}

/// An axis with its bounds.
struct Placed {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Placed {
    fn place(&self, value: f64) -> f64 {
        let part = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        self.from + part * (self.to - self.from)
    }

    /// Values that get a line, with their labels.
    fn ticks(&self) -> Vec<(f64, String)> {
        match self.scale {
            Scale::Linear => {
                let step = step(self.high - self.low);
                let count = ((self.high - self.low) / step).round() as usize;
                (0..=count).map(|i| self.low + step * i as f64).map(|v| (v, label(v))).collect()
            }
            Scale::Log => {
                let decades = (self.high / self.low).log10().round() as i32;
                (0..=decades).map(|d| self.low * 10f64.powi(d)).map(|v| (v, label(v))).collect()
            }
        }
    }
}

/// A round step of which about six cover `range`.
fn step(range: f64) -> f64 {
    let rough = range / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|f| f * power >= rough * 0.999).unwrap_or(10.0);
    factor * power
}

fn label(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        size if (1e-3..1e5).contains(&size) => {
            let text = format!("{value:.4}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        _ => format!("{value:.0e}"),
    }
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, attributes: &str, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" {attributes}>{content}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(scale: Scale, style: Style, points: Vec<(f64, f64)>) -> Chart {
        let axis = |title| Axis { title, scale };
        let series = vec![Series { name: "a<b".to_owned(), style, points }];
        Chart { title: "A & B".to_owned(), x: axis("x"), y: axis("y"), series }
    }

    #[test]
    fn points_lie_inside_the_drawing_and_in_the_order_of_their_values() {
        for scale in [Scale::Linear, Scale::Log] {
            let chart = chart(scale, Style::Points, Vec::new());
            let axis = chart.x.placed([3.0, 70.0, 812.0].into_iter(), 100.0, 500.0);
            let places = [3.0, 70.0, 812.0].map(|v| axis.place(v));
            assert!(places.is_sorted() && places[0] >= 100.0 && places[2] <= 500.0, "{scale:?} {places:?}");
            let ticks = axis.ticks();
            assert!(
                ticks.len() >= 3 && ticks.iter().all(|(v, _)| (99.9..500.1).contains(&axis.place(*v))),
                "{ticks:?}"
            );
        }
    }

    #[test]
    fn a_page_escapes_text_and_leaves_out_what_a_scale_cannot_show() {
        let page = page(&[chart(Scale::Log, Style::Line, vec![(1.0, 0.0), (2.0, f64::NAN), (3.0, 4.0)])]);
        assert!(page.contains("A &amp; B") && page.contains("a&lt;b"));
        assert_eq!(page.matches("<circle").count(), 1);
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
    }

    #[test]
    fn a_chart_without_points_is_drawn_empty() {
        let page = page(&[chart(Scale::Linear, Style::Dashed, Vec::new()), chart(Scale::Log, Style::Line, Vec::new())]);
        assert!(!page.contains("NaN") && page.ends_with("</svg>\n"));
    }
}
